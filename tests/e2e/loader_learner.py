"""A learner with its own loader, shuffled by torch, in one process or several. Each rank records its samples.

Rank r appends one line per step to OUT.<r>.jsonl, before the step can be merged.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_diloco  # noqa: F401  # registers the strategy
from lightning_diloco.strategy.data.leased_part import MIN_SAMPLES
from tests.quiet import QUIET


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Sample k consists of a row of numbers and k."""

    def __len__(self) -> int:
        return MIN_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index


class Echo(L.LightningModule):
    """A layer that learns to reproduce its input."""

    def __init__(self, out: Path, until: Path, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(8, 8)
        self.out, self.until, self.pause_s = out, until, pause_s

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, numbers = batch
        note = {
            "session": getattr(self.trainer.strategy._present.link, "_session", None),
            "pid": os.getpid(),
            "samples": numbers.tolist(),
        }
        with Path(f"{self.out}.{self.global_rank}.jsonl").open("a") as notes:
            print(json.dumps(note), file=notes, flush=True)
        time.sleep(self.pause_s)
        return nn.functional.mse_loss(self.layer(x), x)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(self.until.exists(), all=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=Path, required=True, help="train until this file exists")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause-s", type=float, required=True)
    given = parser.parse_args()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy="decoupled_diloco",
        max_epochs=1000,
        default_root_dir=given.out.parent,
        **QUIET,
    )
    workers = given.workers
    loader = DataLoader(Numbers(), 12, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    trainer.fit(Echo(given.out, given.until, given.pause_s), loader)


if __name__ == "__main__":
    main()
