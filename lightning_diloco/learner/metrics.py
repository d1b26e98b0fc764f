"""What a link says of its learner: to the syncer, with heartbeats and hellos, to loggers, and to the progress bar."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lightning_diloco.core.digest import digest
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.learner.control_channel import ControlChannel
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.learner.ranks.leader import Leader
from lightning_diloco.learner.status import LearnerStatus, metrics, standing
from lightning_diloco.learner.step_timer import StepTimer
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.protocol.metric_names import COUNTS_TOKENS, EVAL_LOSS, EXCHANGE_P95, LOSS, STALL, TRAINER_STEP

RANK_BYTES = "diloco/rank_bytes"


class LearnerMetrics:
    """Mixin of `Link`; the training thread calls it, and threads beside it what is private."""

    device: FragmentDevice[Any, Any]
    _changed: threading.Condition
    _machine: LearnerState
    _freight: FragmentExchange
    _line: ControlChannel
    _unit: str | None
    _state: LearnerState | None
    _leader: Leader | None

    def __init__(self) -> None:
        self._watch = StepTimer()
        self._losses: dict[str, float] = {}
        self.trainer_step = 0  # steps of the Trainer, those before it was started again included
        self.rank_bytes: int | None = None  # what exchanging takes of the rank that it takes most of, if there are some

    def held_up(self, for_s: float) -> None:
        """Something else of ours took the training thread for so long."""
        self._watch.interrupted()
        self._watch.stall_s += for_s

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        """What people see beside this learner.

        Args:
            read: tells it; None: it cannot be told.
            aside: a thread beside training reads it, as it may wait for a device.
        """
        if self._state is None:
            return
        if aside:
            self._freight.aside(partial(self._set_late_loss, read))
        elif (loss := read()) is not None:
            self._losses[LOSS] = loss

    def _set_late_loss(self, read: Callable[[], float | None]) -> None:
        self.set_loss(read, aside=False)
        with self._changed:  # at the end no step may come that would tell it
            self._machine.metrics = {**self._machine.metrics, **self._losses}

    def set_eval_loss(self, loss: float) -> None:
        """What this learner found when it validated the anchor."""
        self._losses[EVAL_LOSS] = loss

    def metrics(self) -> dict[str, float]:
        """What goes to loggers, by name; of rank 0."""
        if self._state is None:
            return {}
        with self._changed:
            return metrics(self._machine, self._watch, self._freight, self._line)

    def standing(self) -> LearnerStatus:
        """Where this learner stands, for its progress bar; nobody looks at that of another rank than 0."""
        if self._state is None:
            return LearnerStatus((0, 0), staleness_versions=0, in_flight=(), num_learners=None, offline_s=None)
        with self._changed:
            return standing(self._machine, self._line)

    def _reported(self) -> dict[str, float]:
        own = {STALL: self._watch.stall_s, EXCHANGE_P95: self._watch.exchange_p95_s, TRAINER_STEP: self.trainer_step}
        counts = {} if self._unit is None else {COUNTS_TOKENS: float(self._unit == "tokens")}
        ranks = {} if self.rank_bytes is None else {RANK_BYTES: float(self.rank_bytes)}
        return {**own, **counts, **self._losses, **ranks}

    def _mark(self, p: int) -> messages.Mark:
        """What this learner has of a fragment.

        Training goes on while a device, which may be some steps behind, says what its anchor is. Where another one
        lands meanwhile, it is asked again.
        """
        while True:
            before = self._landed(p)
            anchor_P = self._anchor(p)
            if anchor_P is not None and self._landed(p) == before:
                generation, version, proof = before
                return messages.Mark(generation, version, digest(anchor_P), proof)

    def _landed(self, p: int) -> tuple[int, int, str]:
        """Generation, version and its proof; between two landings, as a landing holds the lock."""
        with self._changed:
            f = self._machine.fragments[p]
            return f.generation, f.landed, f.proof

    def _anchor(self, p: int) -> Tensor | None:
        """None: not all parts of it are of one version at present."""
        return self.device.anchor(p) if self._leader is None else self._leader.device.counted_anchor(p)
