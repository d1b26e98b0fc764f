"""A learner of several ranks that records the state at the start and end of steps: moments, rates, random numbers,
samples.

Each rank appends to OUT.<rank>.jsonl, one line a step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_diloco import DecoupledDiLoCoStrategy
from tests.quiet import QUIET


def is_wrapped(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Return True for the first layer, so that the last layer belongs to the root."""
    return recurse or (isinstance(module, nn.Linear) and module.in_features == WIDTH)


INNER = {
    "ddp": lambda: "auto",
    "spawn": lambda: DDPStrategy(start_method="spawn"),
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy=is_wrapped),
    "fsdp2": lambda: ModelParallelStrategy(2, 1),
}
NUM_SAMPLES, WIDTH = 1 << 16, 8


class Noisy(L.LightningModule):
    """Two layers with dropout, AdamW, and a rate that changes with every step."""

    def __init__(self, out: Path, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 33), nn.Dropout(0.1), nn.Linear(33, 3))
        self.out, self.pause_s = out, pause_s

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch[1]
        self.note("begins", batch)
        time.sleep(self.pause_s)
        noise = torch.rand(()) + random.random() + np.random.rand()
        return (self.layers(x) - x[:, :3]).square().mean() * (1 + 0.1 * noise)

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.note("ended", batch)

    def note(self, at: str, batch: list[torch.Tensor]) -> None:
        """Append a line. A checkpoint is taken after a line of an end, and restored before a line of a start."""
        told = {"pid": os.getpid(), "at": at, "step": self.trainer.global_step, "samples": batch[0].tolist()}
        with Path(f"{self.out}.{self.global_rank}.jsonl").open("a") as notes:
            print(json.dumps({**told, **self.held()}), file=notes)

    def held(self) -> dict[str, Any]:
        """Return the state of this rank other than the parameters."""
        optimizer = self.trainer.optimizers[0]
        state = optimizer.state_dict()["state"]
        moments = [value for values in state.values() for _, value in sorted(values.items())]
        return {
            "moments": digest(*moments),
            "num_numbers": sum(local(value).numel() for value in moments),
            "rate": optimizer.param_groups[0]["lr"],
            "random": digest(torch.get_rng_state(), torch.tensor(np.random.get_state()[1].tolist())),
            "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        }

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(torch.arange(NUM_SAMPLES), x), batch_size=4, shuffle=True)


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(local(tensor).numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inner", choices=INNER, default="ddp")
    parser.add_argument("--store", required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pause-s", type=float, default=0.01)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s")
    options = {"checkpoint_every": 10, "checkpoint_store": given.store, "preemption_s": 60.0}  # however busy it is here
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DecoupledDiLoCoStrategy(INNER[given.inner](), **options),
        max_steps=given.steps,
        default_root_dir=given.out.parent,
        **QUIET,
    )
    trainer.fit(Noisy(given.out, given.pause_s))


if __name__ == "__main__":
    main()
