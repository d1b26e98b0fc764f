"""What a link says of its learner: with each heartbeat to the syncer, to loggers, and to the progress bar."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from lightning_diloco.protocol import LearnerState
from lightning_diloco.runtime.freight import Freight
from lightning_diloco.runtime.line import Line
from lightning_diloco.runtime.report import EVAL_LOSS, EXCHANGE_P95, LOSS, STALL
from lightning_diloco.runtime.standing import Standing, metrics, standing
from lightning_diloco.runtime.stopwatch import Stopwatch


class SaysOfItself:
    """Mixin of `Link`; the training thread calls it."""

    _changed: threading.Condition
    _machine: LearnerState
    _freight: Freight
    _line: Line

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._losses: dict[str, float] = {}

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
        if aside:
            self._freight.aside(partial(self._keep_loss, read))
        else:
            self._keep_loss(read)

    def _keep_loss(self, read: Callable[[], float | None]) -> None:
        if (loss := read()) is not None:
            with self._changed:  # at the end no step may come that would tell it
                self._losses[LOSS] = loss
                self._machine.metrics = {**self._machine.metrics, LOSS: loss}

    def set_eval_loss(self, loss: float) -> None:
        """What this learner found when it validated the anchor."""
        self._losses[EVAL_LOSS] = loss

    def metrics(self) -> dict[str, float]:
        """What goes to loggers, by name."""
        with self._changed:
            return metrics(self._machine, self._watch, self._freight, self._line)

    def standing(self) -> Standing:
        """Where this learner stands, for its progress bar."""
        with self._changed:
            return standing(self._machine, self._line)

    def _reported(self) -> dict[str, float]:
        return {STALL: self._watch.stall_s, EXCHANGE_P95: self._watch.exchange_p95_s, **self._losses}
