"""A rank of the ranks_step bench, with one of Lightning's strategies inside this package's strategy or alone.

Rank 0 records the end of each step, including hooks and collectives. It trains until it is killed. `--blocks` adds a
collective to every step, which blocks all ranks.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.cli.faults.step_log import StepClock
from tests.bench.landing_clock import LandingClock
from tests.bench.sleeper import Sleeping
from tests.quiet import QUIET

NUM_RANKS, WIDTH = 2, 128
NUM_STEPS = 100_000  # more than it can reach
INNER = {"ddp": DDPStrategy, "fsdp2": lambda: ModelParallelStrategy(NUM_RANKS, 1)}


class Model(Sleeping):
    """A model that is sharded if the strategy requires it."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Use all matrices, so that all have gradients."""
        time.sleep(self._step_s)
        return torch.stack([matrix.sum() for matrix in self.matrices]).sum() * batch.mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


class Blocking(Callback):
    """Makes all ranks wait for each other before a step ends."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        dist.all_reduce(torch.zeros(sum(p.numel() for p in module.parameters())))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inner", choices=INNER, required=True)
    parser.add_argument("--plain", action="store_true", help="without the strategy")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("root", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    inner = INNER[given.inner]()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=inner if given.plain else DecoupledDiLoCoStrategy(inner, num_fragments=4, checkpoint_every=0),
        max_steps=NUM_STEPS,
        callbacks=[*([Blocking()] if given.blocks else []), LandingClock(given.root), StepClock()],
        default_root_dir=given.root,
        **QUIET,
    )
    trainer.fit(Model(given.numel, WIDTH, given.step_s), DataLoader(torch.ones(NUM_RANKS * NUM_STEPS, 1)))


if __name__ == "__main__":
    main()
