"""Metrics of a learner: for heartbeats and hellos, for loggers, and for the progress bar."""

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
    """Mixin of `Link`; the training thread calls public methods, background threads private ones."""

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
        self.trainer_step = 0  # steps of the Trainer, including those before a restart
        self.rank_bytes: int | None = None  # memory for exchanging, of the rank that needs most

    def held_up(self, for_s: float) -> None:
        """Count time for which other code of this package held the training thread as stall."""
        self._watch.interrupted()
        self._watch.stall_s += for_s

    def set_loss(self, read: Callable[[], float | None], *, aside: bool) -> None:
        """Set the loss shown for this learner.

        Args:
            read: returns the loss, or None if it is unknown.
            aside: read it in a background thread, because reading may wait for a device.
        """
        if self._state is None:
            return
        if aside:
            self._freight.aside(partial(self._set_late_loss, read))
        elif (loss := read()) is not None:
            self._losses[LOSS] = loss

    def _set_late_loss(self, read: Callable[[], float | None]) -> None:
        self.set_loss(read, aside=False)
        with self._changed:  # there may be no later step that reports it
            self._machine.metrics = {**self._machine.metrics, **self._losses}

    def set_eval_loss(self, loss: float) -> None:
        """Set the loss of the anchor that this learner has evaluated."""
        self._losses[EVAL_LOSS] = loss

    def metrics(self) -> dict[str, float]:
        """Return the metrics for loggers, by name; only rank 0 has some."""
        if self._state is None:
            return {}
        with self._changed:
            return metrics(self._machine, self._watch, self._freight, self._line)

    def standing(self) -> LearnerStatus:
        """Return the status of this learner, for its progress bar; only rank 0 has one."""
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
            return f.generation, f.landed, f.proof

    def _anchor(self, p: int) -> Tensor | None:
        """Return the anchor; None if its parts have different versions at the moment."""
        return self.device.anchor(p) if self._leader is None else self._leader.device.counted_anchor(p)
