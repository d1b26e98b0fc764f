"""A learner's link to its run: the protocol machine, driven by the training thread and the threads beside it.

1. The training thread enters in `step`, `set_evaluating` and `finish`. It takes the machine's lock, which others hold
   for microseconds, and does nothing but snapshots and landings. Before parameters change between two of these, it
   calls `settle`.
2. Messages travel on a `ControlChannel`, tensors as `FragmentExchange`; their threads never change live parameters.
3. An error in any thread surfaces at the training thread's next call; none is swallowed. A network that fails is no
   error: the learner trains on.
4. Every fit ends in `close`, which says goodbye if there is somebody to hear it, and leaves no thread behind.
5. A learner may have several ranks, each with a link. Rank 0 has the machine, and says what all of them do
   (`ranks/leader.py`); the others do it (`ranks/follower.py`). Whatever lands or is snapshotted was promised when the
   step began, and is done by all ranks when it ends. Before training and after it, ranks wait for each other; within
   steps nobody waits. A learner of one rank promises nothing, and skips all that.
6. While a rank does not answer, its learner is silent: it lapses like one that is gone, and returns with that rank.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from lightning_diloco import errors
from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.errors import ConfigError, DiLoCoError
from lightning_diloco.learner.control_channel import TICK_S, ControlChannel
from lightning_diloco.learner.embedded_syncer import EmbeddedSyncer
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.learner.join import Joining, MakeDevice, where
from lightning_diloco.learner.lease_client import LeaseClient
from lightning_diloco.learner.leftovers import tidy
from lightning_diloco.learner.metrics import LearnerMetrics
from lightning_diloco.learner.name import own_name
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.follower import Follower
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.leader import Leader
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.learner.retry import retry
from lightning_diloco.learner.rotation import Followed
from lightning_diloco.learner.whereabouts import given_address, given_run_dir
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.process.threads import Crew
from lightning_diloco.protocol import actions, events, limits, messages
from lightning_diloco.protocol.data_ranges import Catalogue, Piece, divided
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.portions import LargeConnection, Portioned

log = logging.getLogger(__name__)

LEAVE_S = 10.0
FINAL_S = 10.0
GOODBYE_S = 2.0
THREADS_S = 3.0
SILENT_S = 5.0
KNOWN = ("learner_id", "run", "incarnation", "slot", "data_seed", "is_late")  # at all ranks
_NOTHING = actions.Promise((), ())


class Link(LearnerMetrics):
    """One learner's part in a run, at one of its ranks; one thread, the one that trains, calls its methods.

    Args:
        run_options: explicit `RunConfig` options.
        learner: this learner's own options.
        root_dir: where an embedded syncer's run directory goes; None: it is temporary, and removed when the run has
            finished.
        ranks: of this learner; None: this process is all of it.
        boxes: what each rank holds of each parameter; empty: all of it.
        kind: how the ranks' devices work together.
        connect: makes the connection.

    Attributes:
        agreed: what all ranks know since the last step ended.
    """

    def __init__(
        self,
        run_options: dict[str, Any],
        learner: LearnerConfig,
        root_dir: Path | None,
        *,
        ranks: Ranks | None = None,
        boxes: Sequence[Mapping[str, Any]] = (),
        kind: type[ReplicatedDevice] = ReplicatedDevice,
        connect: Callable[[JoinAddress], Connection] = FlightConnection,
    ) -> None:
        super().__init__()
        self._run_options = run_options
        self._learner = learner
        self._root_dir = root_dir
        self._connect = connect
        self._session = secrets.token_hex(16)
        self._changed = threading.Condition(threading.RLock())
        self._crew = Crew(self._fail)
        self._error: BaseException | None = None
        self._tokens = 0
        self._unit: str | None = None
        self._left: actions.Left | None = None
        self._has_verdict = False
        self._num_landings = 0
        self._embedded: EmbeddedSyncer | None = None
        self._connection: LargeConnection | None = None
        self._state: LearnerState | None = None
        self._desk: LeaseClient | None = None
        self._ranks = ranks
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self.agreed = Agreement()
        self._promise = _NOTHING
        self._skipped_tokens = 0
        self._ends_together = False
        if ranks is not None:
            make_device = partial(kind, ranks=ranks, boxes=boxes, stopping=self._crew.stopping)
            if ranks.rank == 0:
                self._leader = Leader(ranks, make_device)
            else:
                self._follower = Follower(ranks, make_device, self._crew, given_address(learner), connect)

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """Join: block until this learner has seeded the run or adopted its anchors, and may step.

        Other ranks start, or fail, with rank 0.

        Raises:
            JoinError: the syncer cannot be reached, or refused.
            AuthError: wrong token or certificate.
            ConfigError: an explicit option contradicts the run's.
            PlanMismatchError: another model than the run's.
        """
        known: dict[str, Any]
        if self._leader is not None:
            with self._leader.telling_failure():
                self._join(model, self._leader.telling(make_device))
            self.agreed = Agreement(fleet_tokens=self.fleet_tokens)
            known = {name: getattr(self, name) for name in (*KNOWN, "fleet_tokens")}
            self._leader.go(self.join_file, known)
        elif self._follower is not None:
            known = self._follower.join(make_device)
            self.agreed = Agreement(fleet_tokens=known.pop("fleet_tokens"))
            vars(self).update(known)
        else:
            self._join(model, make_device)
        if self._ranks is not None:
            self._crew.start("pulse", partial(self._ranks.pulse, self._crew))

    def _join(self, model: ModelDescription, make_device: MakeDevice) -> None:
        address = self._address()
        self._connection = Portioned(Followed(self._connect, address, self.join_file))
        if self._leader is not None:
            self._connection = self._leader.parted(self._connection)
        self.learner_id = self._learner.learner or os.environ.get("DILOCO_LEARNER") or own_name(address.run)
        joined = Joining(
            self._connection,
            address,
            session=self._session,
            learner=self.learner_id,
            options=self._run_options,
            model=model,
            make_device=make_device,
            run_dir=given_run_dir(),
        ).run()
        log.info("learner %s takes part in %s as incarnation %d", self.learner_id, address, joined.welcome.incarnation)
        self.plan: FragmentPlan = joined.plan
        self.config: RunConfig = joined.config
        self.device: FragmentDevice[Any, Any] = joined.device
        self.run, self.incarnation, self.slot = joined.welcome.run, joined.welcome.incarnation, joined.welcome.slot
        self.data_seed = int(joined.welcome.manifest.get("data_seed", 0))
        self.run_steps = joined.run_steps
        self.is_late = self.run_steps > 0
        self.differing = joined.differing
        unit = joined.welcome.manifest["token_unit"]
        self._unit = None if unit is None else str(unit)
        self._state = joined.machine(self.learner_id, self._learner, has_ranks=self._leader is not None)
        with self._changed:  # nothing is handled before all of it is there
            self._line = ControlChannel(
                self._connection,
                self._session,
                joined.cursor,
                self._crew,
                hear=self._hear,
                reconnect=self._reconnect,
                tick=self._tick,
            )
            self._freight = FragmentExchange(
                self._connection,
                self._session,
                self.device,
                plan=self.plan,
                config=self.config,
                crew=self._crew,
                handle=self._handle,
                is_online=lambda: self._line.is_online,
                expect=self._expect,
            )
            self._handle(events.FromTheSyncer(joined.active))

    @property
    def own_run_dir(self) -> Path | None:
        """Run directory of the syncer that this learner started, if it did."""
        return self._embedded.run_dir if self._embedded else None

    @property
    def data_part(self) -> tuple[int, int] | None:
        """(part, parts) of the data this learner reads; None where no split was agreed."""
        parts = self.config.data_parts
        if parts is None or parts == 1:
            return None
        return (self.slot % parts, parts)

    @property
    def fleet_tokens(self) -> int:
        """Tokens that all learners of the run have seen, as far as is known here."""
        return self._machine.fleet_tokens

    @property
    def stopped(self) -> str | None:
        """Why the whole run is over, if it is."""
        return self._machine.stopped

    def stop_run(self, reason: str) -> None:
        """Tell everybody to end."""
        self._handle(events.StopRun(reason))

    def lease(self, catalogue: Catalogue) -> LeaseClient:
        """Read the data that the run leases, from now on."""
        self._desk = LeaseClient(self._machine.lessee, self._changed, catalogue, self._raise_error)
        return self._desk

    # -------------------------------------------------------------------------------------------------------- training

    def step(self, tokens: int, unit: str) -> None:
        """An inner step is done. Never waits for the network.

        Args:
            tokens: in this step's batches; they come on top of those that `begin_step` told of.
            unit: what was counted, "tokens" or "samples".

        Raises:
            DiLoCoError: an error that a thread beside met since the last call, or that another rank met.
        """
        began_s = time.perf_counter()
        agreed = self._agree()
        entered_s = time.perf_counter()
        self._watch.stall_s += entered_s - began_s
        self._check_unit(unit)
        tokens, self._skipped_tokens = tokens + agreed.tokens + self._skipped_tokens, 0
        self._tokens += tokens
        self._watch.entered(entered_s, tokens)
        num_exchanges = 0
        with self._changed:  # the machine and the anchors change together
            self._make(agreed)
            if (state := self._state) is not None:
                state.step_s, state.long_step_s = self._watch.step_s, self._watch.long_step_s
                state.tokens_per_s = self._watch.tokens_per_s
                state.metrics = self._reported()
                num_exchanges = self._handle(events.StepDone(state.step + 1, self._tokens, self._collected(tokens)))
        self._watch.left(entered_s, time.perf_counter(), num_exchanges=num_exchanges)

    def begin_step(self, tokens: int, *, is_asked: bool = False, saves: bool = False, stops: bool = False) -> None:
        """Several ranks: all batches of a step are known; say so, and what its end will bring.

        Args:
            tokens: in this rank's batches.
            is_asked: to end, by a signal.
            saves: rank 0 says that all take a checkpoint before the next batch.
            stops: this is the last step of training.
        """
        entered_s = time.perf_counter()
        self._begin(tokens, num_asked=int(is_asked), saves=saves and self._leader is not None, stops=stops)
        self._watch.stall_s += time.perf_counter() - entered_s

    def skip_step(self) -> None:
        """What began turned out to be no step; its tokens count in the next one."""
        self._skipped_tokens += self._agree().tokens

    def _begin(self, tokens: int = 0, **said: Any) -> None:
        assert self._ranks is not None
        if self._leader is not None:
            with self._changed:
                self._promise = _NOTHING
                self._handle(events.StepBegins())
            promised = {"land": self._promise.land, "snapshot": self._promise.snapshot}
            said = {"fleet_tokens": self.fleet_tokens, **promised, **said}
        agreement = Agreement(**{"tokens": tokens, "num_failed": int(self._error is not None), **said})
        self._ranks.begin(agreement.numbers(self.plan.num_fragments))

    def _agree(self) -> Agreement:
        """What all ranks have begun this step with; errors of any."""
        if self._ranks is not None:
            self.agreed = Agreement.of(self._ranks.end())
        self._raise_error()
        if self.agreed.num_failed:
            raise DiLoCoError("another rank of this learner has stopped; its own output says why; start it again")
        return self.agreed

    def _make(self, agreed: Agreement) -> None:
        """What was promised for this boundary, at this rank; rank 0's machine then asks for it."""
        if self._leader is not None:
            self._leader.device.make(agreed.land, agreed.snapshot)
        elif self._follower is not None:
            self._follower.make(agreed)
            self._num_landings += len(agreed.land)

    def settle(self) -> None:
        """Parameters are about to change: what a snapshot has promised to copy of them is copied when this returns."""
        entered_s = time.perf_counter()
        self.device.settle()
        self._watch.settled(time.perf_counter() - entered_s)

    def set_evaluating(self, evaluating: bool) -> None:
        """Validation, or a trial that must not be exchanged, begins or ends."""
        self._raise_error()
        self.settle()
        self._watch.interrupted()
        self._handle(events.Evaluating(evaluating))

    # --------------------------------------------------------------------------------------------------------- the end

    def finish(self, reason: messages.Reason = "finished", within_s: float | None = None) -> bool:
        """Drain and leave; see `drain_s` for how long.

        Args:
            reason: why; only who has finished is asked for a verdict on the final anchor.
            within_s: how long to drain at most, instead of `drain_s`.

        Returns:
            Whether this was the last learner. Its anchors are then the run's final ones, and it is expected to
            `report` on them.
        """
        if self._leader is None:
            return self._leave(reason, within_s) if self._follower is None else self._follow_to_the_end()
        self._ends_together = True
        try:
            is_last = self._leave(reason, within_s)
        except BaseException:
            self._begin(is_over=True, num_failed=1)
            self._leader.end_failed()
            raise
        finally:
            self._ends_together = False
        landed = tuple(self._leader.device.landed) if is_last else ()
        self._begin(is_over=True, land=landed, snapshot=(), is_last=is_last, is_drained=self.is_drained)
        self._agree()
        self._leader.end()
        return is_last

    def _follow_to_the_end(self) -> bool:
        """Land what still comes, until rank 0 has left."""
        assert self._follower is not None
        while not self._follower.is_over:
            self._begin()
            self._make(self._agree())
            self._follower.is_over = self.agreed.is_over
        return self.agreed.is_last

    def _leave(self, reason: messages.Reason, within_s: float | None) -> bool:
        self._raise_error()
        self._watch.interrupted()
        with self._changed:
            self._machine.metrics = self._reported()
        self._handle(events.Finish(reason, within_s=within_s))
        self._wait_for_leave(LEAVE_S if within_s is None else GOODBYE_S)
        self._raise_error()
        if self._left is None:
            log.info("the syncer did not take note of this leave in time; what was not merged counts as lapsed")
        is_last = reason == "finished" and self._left is not None and self._left.is_last
        if is_last and self.is_drained:
            self._take_final()
            self._raise_error()
        return is_last

    @property
    def is_drained(self) -> bool:
        """Whether all that this learner has trained is merged, and in its anchors."""
        if self._state is None:
            return self.agreed.is_drained
        with self._changed:
            return not any(self._machine.progress.pending)

    @property
    def num_landings(self) -> int:
        """How often an anchor has changed since this learner joined."""
        return self._num_landings

    def report(self, eval_loss: float | None, reason: str | None = None, *, within_s: float = FINAL_S) -> None:
        """The last leaver's verdict on the final anchor; a syncer that is being started again gets it, too."""
        if self._state is None:
            return  # rank 0 does
        self._has_verdict = True
        shown = None if reason is None else reason[: limits.MAX_CHARS]  # it may quote all metrics of a validation
        self._line.say_now(messages.Evaluated(eval_loss, shown), within_s=within_s)

    def close(self) -> None:
        """Let go of the run; without `finish`, leave at once. Idempotent.

        Groups of ranks stay if this ended in any other way: a rank may never answer again.
        """
        if self._crew.stopping.is_set():
            return
        try:
            if self._state is not None:
                self._say_goodbye()
        finally:
            self._crew.stopping.set()
            if self._state is not None:
                self._freight.stop()
            if self._follower is not None:
                self._follower.close()
            if self._connection is not None:
                self._connection.close()
            if running := self._crew.join(THREADS_S):
                log.warning("still waiting for the network or for rank 0, and left alone: %s", ", ".join(running))
            elif self._ranks is not None and (role := self._leader or self._follower) and role.is_over:
                self._ranks.close()
            if self._embedded is not None:
                is_last = self._left is not None and self._left.is_last
                self._embedded.let_go(was_joined=self._state is not None, is_last=is_last)
                is_kept = self._state is not None and not (is_last and self.is_drained)
                if self._root_dir is None and self._embedded.has_ended and not is_kept:
                    shutil.rmtree(self._embedded.run_dir, ignore_errors=True)

    def _say_goodbye(self) -> None:
        if self._left is None and self._line.is_online and not isinstance(self._error, errors.FencedError):
            self._handle(events.Finish("failed", drain=False))
            self._wait_for_leave(GOODBYE_S)
        self._line.hurry()
        if self._left is not None and self._left.is_last and not self._has_verdict:
            self.report(None, "the last learner ended without validating the anchor", within_s=GOODBYE_S)

    def _wait_for_leave(self, grace_s: float) -> None:
        """The training thread has nothing else to do: it makes the boundaries at which things land, on all ranks."""
        failed_before = self._error
        while self._left is None and self._error is failed_before:
            if time.monotonic() >= self._machine.drain_until_s + grace_s:
                break
            if self._ends_together:
                self._begin()
                self._agree()
            with self._changed:
                if self._ends_together:
                    self._make(self.agreed)
                self._handle(events.Pause())
                if self._left is None and self._error is failed_before:
                    self._changed.wait(TICK_S)

    def _take_final(self) -> None:
        """Nobody else takes part: what is newest now stays so."""
        try:
            for p, f in enumerate(self._machine.fragments):
                take = partial(self._freight.take_final, p, f.generation, f.landed)
                retry(take, within_s=FINAL_S)
        except DiLoCoError as error:
            log.warning("the final anchor could not be fetched, the one before it is kept: %s", error)

    # ----------------------------------------------------------------------------------------------------- the machine

    @property
    def _machine(self) -> LearnerState:
        assert self._state is not None, "start() comes first"
        return self._state

    def _handle(self, event: events.LearnerEvent) -> int:
        """Tell the machine, and do what it says; returns how many snapshots and landings there were.

        Rank 0 has it, and tells for all.
        """
        if self._follower is not None:
            return 0
        with self._changed:
            num_exchanges = sum(map(self._do, self._machine.handle(event, time.monotonic())))
            self._changed.notify_all()
        return num_exchanges

    def _do(self, action: actions.LearnerAction) -> int:
        match action:
            case actions.Say():
                self._line.say(_signed(action.message))
            case actions.Promise():
                self._promise = action
            case actions.Snapshot():
                self._freight.encode(action.ready)
                return 1
            case actions.Upload():
                self._freight.upload(action.ready)
            case actions.Fetch():
                self._freight.fetch(action)
            case actions.Land():
                self._freight.land(action.fragment)
                self._num_landings += 1
                return 1
            case actions.Forget():
                self._freight.forget(action.fragment, action.seq)
            case actions.Warn():
                log.warning("%s", action.text)
            case actions.Fail():
                self._fail(getattr(errors, action.error)(action.text))
            case actions.SayHello():
                self._line.introduce()
            case actions.Left():
                self._left = action
                self._freight.forget_all()
                self._line.hurry()
        return 0

    def _hear(self, message: messages.FromSyncer) -> None:
        """While a rank is silent nothing is heard, because much of it would be answered."""
        while self._is_silent and not self._crew.stopping.wait(TICK_S):
            pass
        self._handle(events.FromTheSyncer(message))

    def _reconnect(self, number: int) -> None:
        """Say hello again, with what this learner holds."""
        known = tuple(self._mark(p) for p in range(self.plan.num_fragments))
        self._handle(events.Reconnected(number, known))

    def _tick(self) -> None:
        if not self._is_silent:
            self._handle(events.Tick())

    @property
    def _is_silent(self) -> bool:
        return self._ranks is not None and self._ranks.silent_s >= SILENT_S

    def _expect(self, p: int, values: Tensor) -> None:
        """These values will be adopted at a boundary; only other ranks need to know."""
        if self._leader is not None:
            self._leader.device.expect(p, values)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error for the training thread."""
        with self._changed:
            if self._error is None and not self._crew.stopping.is_set():
                self._error = error
                log.error("the link stops: %s", error)
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --------------------------------------------------------------------------------------------------------- helpers

    @property
    def join_file(self) -> Path | None:
        """Where the syncer says how it is joined, as far as that is known here."""
        folder = self.own_run_dir or given_run_dir()
        return None if folder is None else folder / "join"

    def _address(self) -> JoinAddress:
        if (address := given_address(self._learner)) is not None:
            return address
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if self._root_dir is None:
            run_dir = Path(tempfile.mkdtemp(prefix=f"diloco-{name}-"))
        else:
            run_dir = self._root_dir / "diloco" / name
            tidy(run_dir.parent)
        self._embedded = EmbeddedSyncer(run_dir)
        self._crew.start("syncer", partial(self._embedded.watch, self._crew.stopping, lambda: self._left is None))
        address = self._embedded.address
        log.warning(
            "started a syncer for this run at %s; others join it with DILOCO_JOIN=$(cat %s)", address, run_dir / "join"
        )
        return address

    def _collected(self, tokens: int) -> tuple[Piece, ...]:
        """What a step of so many tokens was trained on, where that is leased.

        Rank 0 knows of all samples, and until a step ends of its own tokens only.
        """
        pieces = self._desk.collect() if self._desk else ()
        return pieces if self._leader is None else divided(pieces, tokens)

    def _check_unit(self, unit: str) -> None:
        if self._unit is None:
            self._unit = unit
        elif unit != self._unit:
            raise ConfigError(
                f"this learner counts {unit}, the run counts {self._unit}; all learners must count alike; "
                "pass token_count_fn to the strategy"
            )


def _signed(message: messages.FromLearner) -> messages.FromLearner:
    """A hello says where it comes from."""
    return replace(message, where=where()) if isinstance(message, messages.Hello) else message
