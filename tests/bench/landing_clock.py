"""Records of the learners of benches: files of numbers, and the time at which each update of the anchor landed."""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

PATTERN = "landings-*.f64"


class Numbers:
    """A file of float64 numbers of this process, like that of the step clock; it survives SIGKILL.

    Args:
        folder: folder of the file.
        pattern: its name; `*` is the pid.
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self._path = folder / pattern.replace("*", str(os.getpid()))
        self._fd: int | None = None

    def append(self, *values: float) -> None:
        """Append numbers in one write; the first write creates the file."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._fd, array("d", values).tobytes())


class LandingClock(Callback):
    """Writes `landings-<pid>.f64` on rank 0, from outside the link; other strategies write no file.

    Args:
        folder: folder of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._landings = Numbers(folder, PATTERN)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        device = getattr(getattr(trainer.strategy, "_joined", None), "device", None)
        if device is None or not trainer.is_global_zero:
            return
        land = device.land

        def landed(*args: Any) -> None:
            land(*args)
            self._landings.append(time.time())

        device.land = landed
