"""The link of a rank to its learner's run: the interface that the training thread calls.

1. The training thread calls `step`, `set_evaluating` and `finish`. Within them it only takes snapshots and lands
   updates. Before it changes parameters between two of these calls, it calls `settle`.
2. An error in any thread is raised at the training thread's next call.
3. Every fit ends with `close`. It tells the syncer that the learner leaves, if the syncer can be reached, and stops all
   threads.
4. Each role of a rank has its own subclass. A learner's only rank is a `Member` of the run (`member.py`). Rank 0 of
   several ranks is a `Leader` (`ranks/leader.py`), a member that also tells the other ranks what to do. Each of the
   other ranks is a `Follower` (`ranks/follower.py`). The base class has the common part. Methods that concern only
   members do nothing in it.
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
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.status import LearnerStatus
from lightning_diloco.learner.step_timer import StepTimer
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.process.threads import Crew
from lightning_diloco.protocol import events, messages
from lightning_diloco.protocol.data_ranges import Catalogue
from lightning_diloco.protocol.metric_names import EVAL_LOSS

log = logging.getLogger(__name__)

THREADS_S = 3.0

AskedToLeave = Callable[[], float | None]


def never() -> None:
    """Return that there was no SIGTERM."""


class Link:
    """The link of one rank of a learner. Only the training thread calls its public methods.

    `start` sets the attributes from `plan` to `differing`.

    Attributes:
        plan: fragment plan of the run.
        config: options of the run.
        device: device that holds the anchors.
        learner_id, run, incarnation, slot, data_seed: identity of the learner and of the run, as of the join.
        is_late: whether the run had made steps before this learner joined.
        run_steps: number of these steps; only on rank 0.
        differing: frozen parameters that differ from those of the run's first learner; only on rank 0.
        agreed: what all ranks agreed on when the last step ended.
        num_landings: number of updates that have landed since this learner joined.
        is_preempted: whether SIGTERM came while this learner waited for its last contributions; all ranks know it.
        trainer_step: steps of the Trainer, including those before a restart.
        rank_bytes: bytes of memory that exchanging takes, on the rank that needs the most; None: unknown.
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
        self._timer = StepTimer()
        self._losses: dict[str, float] = {}
        self._unit: str | None = None
        self._changed = threading.Condition(threading.RLock())
        self._crew = Crew(self._fail)
        self._error: BaseException | None = None
        self._tokens = self._skipped_tokens = 0
        self.agreed = Agreement()
        self.num_landings = 0
        self.is_preempted = False
        self.trainer_step = 0
        self.rank_bytes: int | None = None

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """Join the run. Blocks until this learner has seeded the run or adopted its anchors, and may step.

        The other ranks start, or fail, together with rank 0.

        Args:
            model: description of this learner's model.
            make_device: makes the device for a plan.

        Raises:
            JoinError: the syncer cannot be reached, or refused the join.
            AuthError: wrong token or certificate.
            ConfigError: an explicit option contradicts the run's.
            PlanMismatchError: the model is not the run's.
            RunOverError: the run has ended.
        """
        raise NotImplementedError

    @property
    def own_run_dir(self) -> Path | None:
        """Run directory of the syncer that this rank started; None if it started none."""
        return None

    @property
    def data_part(self) -> tuple[int, int] | None:
        """(part, parts) of the data that this learner reads; None if the run does not split the data."""
        parts = self.config.data_parts
        if parts is None or parts == 1:
            return None
        return (self.slot % parts, parts)

    @property
    def fleet_tokens(self) -> int:
        """Tokens that all learners of the run have seen, as far as this rank knows."""
        return self.agreed.fleet_tokens

    @property
    def stopped(self) -> str | None:
        """Why the whole run is over; None if it is not over. Only rank 0 knows it."""
        return None

    def stop_run(self, reason: str) -> None:
        """Ask the syncer to end the run for all learners."""
        self._handle(events.StopRun(reason))

    def lease(self, catalogue: Catalogue) -> LeaseClient:
        """Start to lease this data from the run, and return the client. Only rank 0 leases, for all ranks."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------------- training

    def step(self, tokens: int, unit: str) -> None:
        """Process the end of an inner step. Never waits for the syncer.

        With several ranks, this waits until all ranks have called `begin_step`.

        Args:
            tokens: tokens in this step's batches that were not passed to `begin_step`.
            unit: what was counted, "tokens" or "samples".

        Raises:
            DiLoCoError: a background thread or another rank has failed since the last call.
        """
        began_s = time.perf_counter()
        agreed = self._agree()
        entered_s = time.perf_counter()
        self._timer.stall_s += entered_s - began_s
        self._check_unit(unit)
        tokens, self._skipped_tokens = tokens + agreed.tokens + self._skipped_tokens, 0
        self._tokens += tokens
        self._timer.entered(entered_s, tokens)
        with self._changed:  # the machine and the anchors change together
            num_exchanges = self._end_step(tokens)
        self._timer.left(entered_s, time.perf_counter(), num_exchanges=num_exchanges)

    def begin_step(self, tokens: int, *, is_asked: bool = False, saves: bool = False, stops: bool = False) -> None:
        """Announce a step to the other ranks when all its batches are known. Only for learners with several ranks.

        Args:
            tokens: tokens in this rank's batches.
            is_asked: a signal has asked this rank to end.
            saves: all ranks take a checkpoint before the next batch; only rank 0's value counts.
            stops: this is the last step of training.
        """
        entered_s = time.perf_counter()
        self._begin(tokens=tokens, num_asked=int(is_asked), saves=saves, stops=stops)
        self._timer.stall_s += time.perf_counter() - entered_s

    def skip_step(self) -> None:
        """Cancel the step that `begin_step` announced. Its tokens count in the next step."""
        self._skipped_tokens += self._agree().tokens

    def settle(self) -> None:
        """Finish the copies that snapshots have scheduled. Call this before parameters change."""
        entered_s = time.perf_counter()
        self.device.settle()
        self._timer.settled(time.perf_counter() - entered_s)

    def set_evaluating(self, evaluating: bool) -> None:
        """Note that validation, or a trial that must not be exchanged, begins or ends."""
        self._raise_error()
        self.settle()
        self._timer.interrupted()
        self._handle(events.Evaluating(evaluating))

    def _begin(self, **said: Any) -> None:
        """Begin a step with this rank's values of the `Agreement`."""
        raise NotImplementedError

    def _agree(self) -> Agreement:
        """Return the sums of the values with which all ranks have begun this step.

        Raises:
            DiLoCoError: a background thread or another rank has failed since the last call.
        """
        self._raise_error()
        return self.agreed

    def _end_step(self, tokens: int) -> int:
        """End a step with this number of tokens; returns the number of snapshots and landings. Needs the lock."""
        raise NotImplementedError

    def _handle(self, event: events.LearnerEvent) -> int:
        """Pass an event to this rank's protocol machine; returns the number of snapshots and landings. Any thread.

        Does nothing on a rank without a protocol machine.
        """
        return 0

    # --------------------------------------------------------------------------------------------------------- metrics

    def held_up(self, for_s: float) -> None:
        """Count time for which other code of this package held the training thread as stall."""
        self._timer.interrupted()
        self._timer.stall_s += for_s

    def set_eval_loss(self, loss: float) -> None:
        """Set the loss of the anchor that this learner has evaluated."""
        self._losses[EVAL_LOSS] = loss

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        """Set the loss shown for this learner.

        Args:
            read: returns the loss, or None if it is unknown.
            aside: read it in a background thread, because reading may wait for a device.
        """

    def metrics(self) -> dict[str, float]:
        """Return the metrics for loggers, by name; empty on ranks other than 0."""
        return {}

    def standing(self) -> LearnerStatus:
        """Return the status of this learner, for its progress bar; only rank 0 knows it."""
        return LearnerStatus((0, 0), staleness_versions=0, in_flight=(), num_learners=None, offline_s=None)

    # --------------------------------------------------------------------------------------------------------- the end

    def finish(
        self, reason: messages.Reason = "finished", within_s: float | None = None, asked: AskedToLeave = never
    ) -> bool:
        """Drain and leave the run; see `LearnerConfig.drain_s` for how long.

        Args:
            reason: why the learner leaves; only a learner that has finished evaluates the final anchor.
            within_s: time limit of the drain, instead of `drain_s`.
            asked: returns the seconds that remain after SIGTERM, None before. From then on the drain has this limit
                as well, and the learner leaves as pre-empted.

        Returns:
            Whether this was the last learner, and has finished. Its anchors are then the run's final ones, and the
            caller must `report` on them.
        """
        raise NotImplementedError

    @property
    def is_drained(self) -> bool:
        """Whether all of this learner's work is merged and in its anchors."""
        return self.agreed.is_drained

    def report(self, eval_loss: float | None, reason: str | None = None) -> None:
        """Send the last learner's verdict on the final anchor; retries if the syncer is being restarted.

        Args:
            eval_loss: loss of the final anchor; None if it could not be evaluated.
            reason: why it could not be evaluated.
        """

    def close(self) -> None:
        """End the link. If `finish` was not called, leave the run at once. Idempotent."""
        if self._crew.stopping.is_set():
            return
        try:
            self._say_goodbye()
        finally:
            self._crew.stopping.set()
            self._stop()
            if running := self._crew.join(THREADS_S):
                log.warning(
                    "threads still wait for the network or for rank 0, and are abandoned: %s", ", ".join(running)
                )
            self._let_go(threads_have_ended=not running)

    def _say_goodbye(self) -> None:
        """Leave the run at once, if `finish` has not done so."""

    def _stop(self) -> None:
        """Wake the threads, so that they notice that they must stop."""
        raise NotImplementedError

    def _let_go(self, *, threads_have_ended: bool) -> None:
        """Release the other ranks, and the syncer that this rank has started, if there are any."""

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
