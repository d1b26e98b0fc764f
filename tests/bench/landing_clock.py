"""A callback for benches that records when each update of the anchor landed, like the step clock for steps."""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

PATTERN = "landings-*.f64"


class LandingClock(Callback):
    """Writes `landings-<pid>.f64` on rank 0, from outside the link; other strategies write no file.

    Args:
        folder: folder of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PATTERN.replace("*", str(os.getpid()))

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        device = getattr(getattr(trainer.strategy, "_joined", None), "device", None)
        if device is None or not trainer.is_global_zero:
            return
        land, fd = device.land, os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        def landed(*args: Any) -> None:
            land(*args)
            os.write(fd, array("d", [time.time()]).tobytes())

        device.land = landed
