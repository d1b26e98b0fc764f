"""A callback for chaos runs: writes down when each inner step ended, and ends training at a time of day or a step.

1. The file survives SIGKILL at any point: one write of 8 bytes per step, no buffer of our own.
2. Times are unix seconds, float64, native byte order. A NaN stands between two steps with a validation in between: what
   separates them is no step.
3. The end is a time of day because a learner that is killed starts anew: a duration would start anew with it.
4. Unlike `max_steps`, an end given here leaves schedules as long as they are.
"""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

PATTERN = "steps-*.f64"


class StepClock(Callback):
    """Writes `steps-<pid>.f64` into Lightning's root directory.

    Args:
        until_s: unix seconds after which training ends as if it had reached its last step; None: never.
        until_step: the global step at which it ends likewise; None: never.
    """

    def __init__(self, until_s: float | None = None, until_step: int | None = None) -> None:
        self._until_s = until_s
        self._until_step = until_step
        self._fd: int | None = None
        self._global_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the file."""
        self._global_step = trainer.global_step
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / PATTERN.replace("*", str(os.getpid()))
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Note the time of a step; a batch whose gradients are only accumulated is none."""
        now_s = time.time()
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._write(now_s)
        if self._until_step is not None and trainer.global_step >= self._until_step:
            trainer.should_stop = True
        is_over = self._until_s is not None and now_s >= self._until_s
        if self._until_s is not None and trainer.strategy.reduce_boolean_decision(is_over, all=False):
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What came since the last step was no step."""
        self._write(float("nan"))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, value: float) -> None:
        if self._fd is not None:
            os.write(self._fd, array("d", [value]).tobytes())


def read_steps(path: Path) -> array[float]:
    """What one process wrote; a torn last number is left out."""
    data = path.read_bytes()
    times = array("d")
    times.frombytes(data[: len(data) // times.itemsize * times.itemsize])
    return times
