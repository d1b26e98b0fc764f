"""A learner's link to its run, as the thread that trains sees it, at any of the learner's ranks.

1. The training thread enters in `step`, `set_evaluating` and `finish`, and does nothing there but snapshots and
   landings. Before parameters change between two of these, it calls `settle`.
2. An error in any thread surfaces at the training thread's next call; none is swallowed.
3. Every fit ends in `close`, which says goodbye if there is somebody to hear it, and leaves no thread behind.
4. There is a class for each role of a rank: the only one is a `Member` of the run (`member.py`); rank 0 of several is
   their `Leader` (`ranks/leader.py`), a member that says what all of them do; the others follow it
   (`ranks/follower.py`). Here is what they have in common; what only members do is nothing here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.errors import ConfigError
from lightning_diloco.learner.join import MakeDevice
from lightning_diloco.learner.lease_client import LeaseClient
from lightning_diloco.learner.metrics import LearnerMetrics
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.status import LearnerStatus
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.process.threads import Crew
from lightning_diloco.protocol import events, messages
from lightning_diloco.protocol.data_ranges import Catalogue

log = logging.getLogger(__name__)

THREADS_S = 3.0


class Link(LearnerMetrics):
    """One learner's part in a run, at one of its ranks; one thread, the one that trains, calls its methods.

    Attributes:
        plan: of the run; as all below, known since `start`.
        config: of the run.
        device: holds the anchors.
        learner_id, run, incarnation, slot, data_seed: what the syncer said at the join.
        is_late: whether the run had made steps before.
        run_steps: how many; at rank 0.
        differing: frozen parameters that differ from those of the run's first learner; at rank 0.
        agreed: what all ranks know since the last step ended.
        num_landings: how often an anchor has changed since this learner joined.
    """

    plan: FragmentPlan
    config: RunConfig
    device: FragmentDevice[Any, Any]
    learner_id: str
    run: str
    incarnation: int
    slot: int
    data_seed: int
    is_late: bool
    run_steps: int
    differing: Collection[str]

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition(threading.RLock())
        self._crew = Crew(self._fail)
        self._error: BaseException | None = None
        self._tokens = self._skipped_tokens = 0
        self.agreed = Agreement()
        self.num_landings = 0

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """Join: block until this learner has seeded the run or adopted its anchors, and may step.

        Other ranks start, or fail, with rank 0.

        Raises:
            JoinError: the syncer cannot be reached, or refused.
            AuthError: wrong token or certificate.
            ConfigError: an explicit option contradicts the run's.
            PlanMismatchError: another model than the run's.
            RunOverError: the run has ended.
        """
        raise NotImplementedError

    @property
    def own_run_dir(self) -> Path | None:
        """Run directory of the syncer that this rank started, if it did."""
        return None

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
        return self.agreed.fleet_tokens

    @property
    def stopped(self) -> str | None:
        """Why the whole run is over, if it is; only rank 0 knows."""
        return None

    def stop_run(self, reason: str) -> None:
        """Tell everybody to end."""
        self._handle(events.StopRun(reason))

    def lease(self, catalogue: Catalogue) -> LeaseClient:
        """Read the data that the run leases, from now on; rank 0 does for all."""
        raise NotImplementedError

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
        with self._changed:  # the machine and the anchors change together
            num_exchanges = self._end_step(tokens)
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
        self._begin(tokens=tokens, num_asked=int(is_asked), saves=saves, stops=stops)
        self._watch.stall_s += time.perf_counter() - entered_s

    def skip_step(self) -> None:
        """What began turned out to be no step; its tokens count in the next one."""
        self._skipped_tokens += self._agree().tokens

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

    def _begin(self, **said: Any) -> None:
        """A step begins with what this rank says, see `Agreement`."""
        raise NotImplementedError

    def _agree(self) -> Agreement:
        """What all ranks have begun this step with.

        Raises:
            DiLoCoError: an error that a thread beside met since the last call, or that another rank met.
        """
        self._raise_error()
        return self.agreed

    def _end_step(self, tokens: int) -> int:
        """A step of so many tokens has ended; returns how many snapshots and landings there were. Holds the lock."""
        raise NotImplementedError

    def _handle(self, event: events.LearnerEvent) -> int:
        """Tell the protocol machine, if it is here; returns how many snapshots and landings there were. Any thread."""
        return 0

    # --------------------------------------------------------------------------------------------------------- metrics

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        """Set the loss shown for this learner.

        Args:
            read: returns the loss, or None if it is unknown.
            aside: read it in a background thread, because reading may wait for a device.
        """

    def metrics(self) -> dict[str, float]:
        """Return the metrics for loggers, by name; only rank 0 has some."""
        return {}

    def standing(self) -> LearnerStatus:
        """Return the status of this learner, for its progress bar; only rank 0 has one."""
        return LearnerStatus((0, 0), staleness_versions=0, in_flight=(), num_learners=None, offline_s=None)

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
        raise NotImplementedError

    @property
    def is_drained(self) -> bool:
        """Whether all that this learner has trained is merged, and in its anchors."""
        return self.agreed.is_drained

    def report(self, eval_loss: float | None, reason: str | None = None) -> None:
        """The last leaver's verdict on the final anchor; a syncer that is being started again gets it, too."""

    def close(self) -> None:
        """Let go of the run; without `finish`, leave at once. Idempotent."""
        if self._crew.stopping.is_set():
            return
        try:
            self._say_goodbye()
        finally:
            self._crew.stopping.set()
            self._stop()
            if running := self._crew.join(THREADS_S):
                log.warning("still waiting for the network or for rank 0, and left alone: %s", ", ".join(running))
            self._let_go(threads_have_ended=not running)

    def _say_goodbye(self) -> None:
        """Leave at once, without `finish`."""

    def _stop(self) -> None:
        """Have the threads end, which are told to stop."""
        raise NotImplementedError

    def _let_go(self, *, threads_have_ended: bool) -> None:
        """Let go of everybody else."""

    # --------------------------------------------------------------------------------------------------------- helpers

    def _fail(self, error: BaseException) -> None:
        """Keep the first error for the training thread. Any thread."""
        with self._changed:
            if self._error is None and not self._crew.stopping.is_set():
                self._error = error
                log.error("the link stops: %s", error)
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_unit(self, unit: str) -> None:
        if self._unit is None:
            self._unit = unit
        elif unit != self._unit:
            raise ConfigError(
                f"this learner counts {unit}, the run counts {self._unit}; all learners must count alike; "
                "pass token_count_fn to the strategy"
            )
