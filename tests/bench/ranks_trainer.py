"""A rank of the ranks_step bench: one of Lightning's strategies, with ours around it or not.

Rank 0 times steps from batch end to batch end, hooks and collectives included. `--blocks` adds what the strategy must
not: a collective in every step, for which all ranks wait.
"""

from __future__ import annotations

import argparse
import json
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
from tests.bench.sleeper import Sleeping

NUM_RANKS, WIDTH = 2, 128
INNER = {"ddp": DDPStrategy, "fsdp2": lambda: ModelParallelStrategy(NUM_RANKS, 1)}


class Model(Sleeping):
    """Sharded where the strategy wants it."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """All matrices, so that all have gradients."""
        time.sleep(self._step_s)
        return torch.stack([matrix.sum() for matrix in self.matrices]).sum() * batch.mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


class StepTimes(Callback):
    """Seconds of each step after the first ones."""

    def __init__(self, num_warm_up: int, blocks: bool) -> None:
        self._num_warm_up, self._blocks = num_warm_up, blocks
        self._left_s = 0.0
        self.steps_s: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self._blocks:
            dist.all_reduce(torch.zeros(sum(p.numel() for p in module.parameters())))
        now_s = time.perf_counter()
        if trainer.global_step > self._num_warm_up:
            self.steps_s.append(now_s - self._left_s)
        self._left_s = now_s


def main() -> None:
    """Train, and let rank 0 write how long each step took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner", choices=INNER, required=True)
    parser.add_argument("--plain", action="store_true", help="without our strategy")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--root", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    inner = INNER[given.inner]()
    times = StepTimes(given.warm_up, given.blocks)
    num_steps = given.warm_up + given.steps
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=inner if given.plain else DecoupledDiLoCoStrategy(inner, num_fragments=4, checkpoint_every=0),
        max_steps=num_steps,
        callbacks=times,
        default_root_dir=given.root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(given.numel, WIDTH, given.step_s), DataLoader(torch.ones(NUM_RANKS * num_steps, 1)))
    if trainer.is_global_zero:
        (given.root / "steps_s.json").write_text(json.dumps(times.steps_s))


if __name__ == "__main__":
    main()
