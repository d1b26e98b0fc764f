"""The model, modes and files of learners that compare an accelerator's speed with and without the strategy."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

MODES = WITHOUT, WITH, CONTROL = "without", "with", "control"
NOTES, END = "notes.json", "end"  # a program's files
NUM_AHEAD = 2


class Stack(L.LightningModule):
    """Square layers with residual connections."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.device.type == "cuda")


class Ahead(Callback):
    """Keeps the host at most NUM_AHEAD steps ahead of the device, so that the device sets the pace of steps.

    Args:
        wait: waits for the device at the end of each step, so that the host is not ahead at all; None: it is.
    """

    def __init__(self, wait: Callable[[], object] | None) -> None:
        self._wait = wait
        self._losses: deque[torch.Tensor] = deque()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if self._wait is not None:
            self._wait()
        self._losses.append(outputs["loss"])
        if len(self._losses) > NUM_AHEAD:
            self._losses.popleft().cpu()


def options(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all such learners have."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--mode", choices=MODES, required=True)
    for name in ("width", "depth", "batch", "warm-up"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("root", type=Path)
    return parser
