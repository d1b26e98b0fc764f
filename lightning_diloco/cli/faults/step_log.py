"""A callback for chaos runs that records the end time of each inner step, and ends training at a given time or step.

1. The file survives SIGKILL at any point, because each step is one unbuffered write of 8 bytes.
2. Times are unix seconds, float64, native byte order. A NaN marks a validation between two steps.
3. The end is an absolute time, because a duration would start again when a killed learner restarts.
4. Unlike `max_steps`, an end given here does not change the length of schedules.
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
        until_s: unix seconds after which training ends as it does after its last step; None for no limit.
        until_step: global step at which training ends in the same way; None for no limit.
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
        """Record the time of a step; a batch that only accumulates gradients is not a step."""
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
        """Mark the time since the last step as validation."""
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
    """Read the times that one process wrote; an incomplete last number is left out."""
    data = path.read_bytes()
    times = array("d")
    times.frombytes(data[: len(data) // times.itemsize * times.itemsize])
    return times
