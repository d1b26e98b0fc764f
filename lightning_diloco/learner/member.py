"""The link of a learner with one rank: joins the run, drives the protocol machine, drains and leaves.

1. Any thread passes events to the machine, and carries out its actions while it holds the machine's lock. Other threads
   than the training thread hold this lock for microseconds.
2. On the training thread, this only takes snapshots and lands updates. `ControlChannel` transfers messages, and
   `FragmentExchange` transfers tensors. Their threads never change live parameters.
3. A network failure is not an error. The learner continues to train.
4. With several ranks, rank 0 uses a subclass that also leads the other ranks (`ranks/leader.py`).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_diloco import errors
from lightning_diloco.config import LearnerConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.errors import DiLoCoError
from lightning_diloco.learner import status
from lightning_diloco.learner.control_channel import TICK_S, ControlChannel
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.learner.join import Joining, MakeDevice, located
from lightning_diloco.learner.lease_client import LeaseClient
from lightning_diloco.learner.link import AskedToLeave, Link, never
from lightning_diloco.learner.name import own_name
from lightning_diloco.learner.shards import ShardedConnection
from lightning_diloco.learner.whereabouts import Whereabouts, given_run_dir
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.process.retry import retry
from lightning_diloco.protocol import actions, events, limits, messages
from lightning_diloco.protocol.data_ranges import Catalogue, Piece
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.protocol.metric_names import COUNTS_TOKENS, EXCHANGE_P95, LOSS, RANK_BYTES, STALL, TRAINER_STEP
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.portions import LargeConnection

log = logging.getLogger(__name__)

LEAVE_S = 10.0
FINAL_ANCHOR_S = 60.0  # per fragment: several attempts on a bad network, because the final anchor is the run's result
REPORT_S = 10.0
GOODBYE_S = 2.0


class Member(Link):
    """The link of a learner with one rank.

    Args:
        run_options: explicit `RunConfig` options.
        learner: this learner's own options.
        root_dir: folder for the run directory of an embedded syncer; None: the run directory is temporary, and removed
            when the run has finished.
        connect: makes the connection to the syncer.
    """

    _has_ranks = False

    def __init__(
        self,
        run_options: dict[str, Any],
        learner: LearnerConfig,
        root_dir: Path | None,
        *,
        connect: Callable[[JoinAddress], Connection] = FlightConnection,
    ) -> None:
        super().__init__()
        self._run_options, self._learner, self._connect = run_options, learner, connect
        self._whereabouts = Whereabouts(learner, root_dir, self._crew)
        self._connection: LargeConnection | None = None
        self._session = secrets.token_hex(16)  # nonce of this process
        self._state: LearnerState | None = None
        self._leases: LeaseClient | None = None
        self._left: actions.Left | None = None
        self._has_verdict = False

    # ------------------------------------------------------------------------------------------------------- the start

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """See `Link.start`."""
        address = self._whereabouts.find(lambda: self._left is None)
        self._connection = self._connected(address)
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
        self.plan, self.config, self.device = joined.plan, joined.config, joined.device
        self.run, self.incarnation, self.slot = joined.welcome.run, joined.welcome.incarnation, joined.welcome.slot
        self.data_seed = int(joined.welcome.manifest.get("data_seed", 0))
        self.run_steps = joined.run_steps
        self.is_late = self.run_steps > 0
        self.differing = joined.differing
        unit = joined.welcome.manifest["token_unit"]
        self._unit = None if unit is None else str(unit)
        self._state = joined.machine(self.learner_id, self._learner, has_ranks=self._has_ranks)
        with self._changed:  # the new threads handle no event before all attributes are set
            self._control = ControlChannel(
                self._connection,
                self._session,
                joined.cursor,
                self._crew,
                hear=self._hear,
                reconnect=self._reconnect,
                tick=self._tick,
            )
            self._exchange = FragmentExchange(
                self._connection,
                self._session,
                self.device,
                plan=self.plan,
                config=self.config,
                crew=self._crew,
                handle=self._handle,
                is_online=lambda: self._control.is_online,
                expect=self._expect,
                num_lanes=1 if self._has_ranks else 1 + len(self._sharded.shards),  # ranks upload one at a time
            )
            self._handle(events.FromTheSyncer(joined.active))

    def _connected(self, address: JoinAddress) -> LargeConnection:
        self._sharded = ShardedConnection(self._connect, address, self._whereabouts.join_file)
        return self._sharded

    @property
    def own_run_dir(self) -> Path | None:
        """See `Link.own_run_dir`."""
        return self._whereabouts.own_run_dir

    def lease(self, catalogue: Catalogue) -> LeaseClient:
        """See `Link.lease`."""
        self._leases = LeaseClient(
            self._machine.lessee,
            self._changed,
            catalogue,
            self._raise_error,
            ask=self._tick,
            is_online=lambda: self._control.is_online,
            waited=self.held_up,
        )
        return self._leases

    # --------------------------------------------------------------------------------------------- the protocol machine

    @property
    def _machine(self) -> LearnerState:
        assert self._state is not None, "start() comes first"
        return self._state

    def _handle(self, event: events.LearnerEvent) -> int:
        """See `Link._handle`. Carries out the machine's actions."""
        with self._changed:
            num_exchanges = sum(map(self._do, self._machine.handle(event, time.monotonic())))
            self._changed.notify_all()
        return num_exchanges

    def _do(self, action: actions.LearnerAction) -> int:
        match action:
            case actions.Say():
                message = action.message
                self._control.say(located(message) if isinstance(message, messages.Hello) else message)
            case actions.Snapshot():
                self._exchange.encode(action.ready)
                return 1
            case actions.Upload():
                self._exchange.upload(action.ready)
            case actions.Fetch():
                self._exchange.fetch(action)
            case actions.Land():
                self._exchange.land(action.fragment)
                self.num_landings += 1
                return 1
            case actions.Forget():
                self._exchange.forget(action.fragment, action.seq)
            case actions.Warn():
                log.warning("%s", action.text)
            case actions.Fail():
                self._fail(getattr(errors, action.error)(action.text))
            case actions.SayHello():
                self._control.introduce()
            case actions.Left():
                self._left = action
                self._exchange.forget_all()
                self._control.hurry()
        return 0

    def _hear(self, message: messages.FromSyncer) -> None:
        self._handle(events.FromTheSyncer(message))

    def _tick(self) -> None:
        self._handle(events.Tick())

    def _expect(self, p: int, values: Tensor) -> None:
        """Announce to the other ranks, if there are any, that these values will be adopted at a boundary."""

    def _reconnect(self, number: int) -> None:
        """Send a hello again, with the marks of this learner's anchors."""
        known = tuple(self._mark(p) for p in range(self.plan.num_fragments))
        self._handle(events.Reconnected(number, known))

    def _mark(self, p: int) -> messages.Mark:
        """Return generation, version, digest and proof of a fragment's anchor.

        Training continues while the anchor is read from the device. If an update lands meanwhile, it is read again.
        """
        while True:
            before = self._landed(p)
            anchor_P = self._anchor(p)
            if anchor_P is not None and self._landed(p) == before:
                generation, version, proof = before
                return messages.Mark(generation, version, digest(anchor_P), proof)

    def _landed(self, p: int) -> tuple[int, int, str]:
        """Return generation, version and proof; consistent, because a landing holds the lock."""
        with self._changed:
            f = self._machine.fragments[p]
            return f.generation, f.held, f.proof

    def _anchor(self, p: int) -> Tensor | None:
        """Return the anchor; None if the ranks' parts of it have different versions at the moment."""
        return self.device.anchor(p)

    # -------------------------------------------------------------------------------------------------------- training

    @property
    def fleet_tokens(self) -> int:
        """See `Link.fleet_tokens`."""
        return self._machine.fleet_tokens

    @property
    def stopped(self) -> str | None:
        """See `Link.stopped`."""
        return self._machine.stopped

    def _end_step(self, tokens: int) -> int:
        state, timer = self._machine, self._timer
        state.step_s, state.long_step_s, state.tokens_per_s = timer.step_s, timer.long_step_s, timer.tokens_per_s
        state.metrics = self._reported()
        return self._handle(events.StepDone(state.step + 1, self._tokens, self._collected(tokens)))

    def _collected(self, tokens: int) -> tuple[Piece, ...]:
        """Return the leased data of a step with this number of tokens; empty if no data are leased."""
        return self._leases.collect() if self._leases else ()

    # ---------------------------------------------------------------------------------------------------------- metrics

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        """See `Link.set_loss`."""
        if aside:
            self._exchange.aside(partial(self._set_late_loss, read))
        elif (loss := read()) is not None:
            self._losses[LOSS] = loss

    def _set_late_loss(self, read: Callable[[], float | None]) -> None:
        self.set_loss(read, aside=False)
        with self._changed:  # there may be no later step that reports it
            self._machine.metrics = {**self._machine.metrics, **self._losses}

    def metrics(self) -> dict[str, float]:
        """See `Link.metrics`."""
        with self._changed:
            return status.metrics(self._machine, self._timer, self._exchange, self._control)

    def standing(self) -> status.LearnerStatus:
        """See `Link.standing`."""
        with self._changed:
            return status.standing(self._machine, self._control)

    def _reported(self) -> dict[str, float]:
        """Return the metrics for the syncer, which go out with heartbeats and with the leave."""
        own = {STALL: self._timer.stall_s, EXCHANGE_P95: self._timer.exchange_p95_s, TRAINER_STEP: self.trainer_step}
        counts = {} if self._unit is None else {COUNTS_TOKENS: float(self._unit == "tokens")}
        ranks = {} if self.rank_bytes is None else {RANK_BYTES: float(self.rank_bytes)}
        return {**own, **counts, **self._losses, **ranks}

    # --------------------------------------------------------------------------------------------------------- the end

    def finish(
        self, reason: messages.Reason = "finished", within_s: float | None = None, asked: AskedToLeave = never
    ) -> bool:
        """See `Link.finish`."""
        self._raise_error()
        self._timer.interrupted()
        with self._changed:
            self._machine.metrics = self._reported()
        self._handle(events.Finish(reason, within_s=within_s))
        self._wait_for_leave(LEAVE_S if within_s is None else GOODBYE_S, asked)
        self._raise_error()
        if self._left is None:
            log.info("the syncer did not confirm in time that this learner left; its unmerged tokens count as lapsed")
        has_finished = reason == "finished" and not self.is_preempted
        is_last = has_finished and self._left is not None and self._left.is_last
        if is_last and self.is_drained:
            self._take_final()
            self._raise_error()
        return is_last

    def _wait_for_leave(self, grace_s: float, asked: AskedToLeave = never) -> None:
        """Make boundaries without steps until the learner has left, or until the drain time and `grace_s` are over.

        The training thread does this itself, because updates land and snapshots are taken only on this thread.
        """
        failed_before, was_online = self._error, True
        while self._left is None and self._error is failed_before:
            if not self.is_preempted and (left_s := asked()) is not None:
                within_s = max(0.0, min(left_s - GOODBYE_S, self._machine.drain_until_s - time.monotonic()))
                self.is_preempted, grace_s = True, GOODBYE_S
                log.warning("SIGTERM: the last contributions have %.0f s to be merged", within_s)
                self._handle(events.Finish("preempted", within_s=within_s))
            wait_s = self._machine.drain_until_s + grace_s - time.monotonic()
            if wait_s <= 0.0:
                break
            with self._boundary():
                is_online = self._control.is_online
                self._handle(events.Pause(is_online))
                if was_online and not is_online and wait_s > grace_s:
                    log.warning("the last contributions wait for the syncer to return; Ctrl-C leaves without them")
                was_online = is_online
                if self._left is None and self._error is failed_before:
                    self._changed.wait(TICK_S)

    def _boundary(self) -> AbstractContextManager[Any]:
        """Return a context that holds the lock for one boundary after the last step."""
        return self._changed

    @property
    def is_drained(self) -> bool:
        """See `Link.is_drained`."""
        with self._changed:
            return not any(self._machine.progress.pending)

    def _take_final(self) -> None:
        """Fetch the newest anchors. They are final, because no other learner takes part."""
        try:
            for p, f in enumerate(self._machine.fragments):
                final = retry(partial(self._exchange.take_final, p, f.generation, f.landed), within_s=FINAL_ANCHOR_S)
                with self._changed:
                    f.ended_at(*final)
        except DiLoCoError as error:
            log.warning("the final anchor could not be fetched, the one before it is kept: %s", error)

    def report(self, eval_loss: float | None, reason: str | None = None, *, within_s: float = REPORT_S) -> None:
        """See `Link.report`."""
        self._has_verdict = True
        shown = None if reason is None else reason[: limits.MAX_CHARS]  # it may name all metrics of a validation
        self._control.say_now(messages.Evaluated(eval_loss, shown), within_s=within_s)

    def _say_goodbye(self) -> None:
        if self._state is None:
            return
        if self._left is None and self._control.is_online and not isinstance(self._error, errors.FencedError):
            self._handle(events.Finish("failed", drain=False))
            self._wait_for_leave(GOODBYE_S)
        self._control.hurry()
        if self._left is not None and self._left.is_last and not self._has_verdict:
            self.report(None, "the last learner ended without validating the anchor", within_s=GOODBYE_S)

    def _stop(self) -> None:
        if self._state is not None:
            self._exchange.stop()
        if self._connection is not None:
            self._connection.close()

    def _let_go(self, *, threads_have_ended: bool) -> None:
        is_joined, is_last = self._state is not None, self._left is not None and self._left.is_last
        self._whereabouts.let_go(was_joined=is_joined, is_last=is_last, is_drained=is_joined and self.is_drained)
