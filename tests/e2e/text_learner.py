"""A learner that leases TextData, in one process or several. Each rank records the rows of each step.

Rank r appends one line per step to OUT.<r>.jsonl, before the step can be merged.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.hf import TextData
from lightning_diloco.protocol.data_ranges import Lease
from lightning_diloco.strategy.data.range_batches import Ranges
from tests.e2e.spread import spread
from tests.quiet import QUIET

SEQ_LEN, RANGE_SIZE, VOCAB_SIZE, HIDDEN = 16, 10, 300, 34
INNER = {
    "auto": lambda: "auto",
    "fsdp2": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
    "tp": lambda: ModelParallelStrategy(1, 2, save_distributed_checkpoint=False),
}


class Stamped:
    """Ranges of rows whose first token is their epoch."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges, self.catalogue = ranges, ranges.catalogue

    def read(self, lease: Lease) -> tuple[torch.Tensor, bool]:
        rows, is_last = self.ranges.read(lease)
        stamps = torch.full((len(rows), 1), lease.epoch)
        return torch.cat((stamps, rows[:, 1:]), 1), is_last


class StampedText(TextData):
    @cached_property
    def _ranges(self) -> Stamped:
        return Stamped(super()._ranges)


def text_data(folder: Path, batch_size: int) -> StampedText:
    """Return the data of all documents in the subfolder `texts`."""
    files, cache_dir = str(folder / "texts" / "*.txt"), str(folder / "cache")
    sizes = {"seq_len": SEQ_LEN, "range_size": RANGE_SIZE, "vocab_size": VOCAB_SIZE}
    return StampedText(files=files, cache_dir=cache_dir, val_fraction=0.1, batch_size=batch_size, **sizes)


class Echo(L.LightningModule):
    """Two layers that learn to reproduce their input."""

    def __init__(self, out: Path, until: Path, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(SEQ_LEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, SEQ_LEN))
        self.out, self.until, self.pause_s = out, until, pause_s

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            spread(self.layers, self.device_mesh)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        link = self.trainer.strategy._present.link
        noted = {"incarnation": link.incarnation, "session": getattr(link, "_session", None), "pid": os.getpid()}
        rows = batch["input_ids"].tolist()
        with Path(f"{self.out}.{self.global_rank}.jsonl").open("a") as notes:
            print(json.dumps({**noted, "step": self.trainer.global_step, "rows": rows}), file=notes, flush=True)
        time.sleep(self.pause_s)
        x = batch["input_ids"] / VOCAB_SIZE
        return nn.functional.mse_loss(self.layers(x), x)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(self.until.exists(), all=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=Path, required=True, help="train until this file exists")
    parser.add_argument("--data", type=Path, required=True, help="folder of texts and cache")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--inner", choices=INNER, default="auto")
    parser.add_argument("--batch-size", type=int, required=True, help="of a rank")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--store", required=True)
    parser.add_argument("--pause-s", type=float, default=0.02)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s")
    options = {"checkpoint_every": 5, "checkpoint_store": given.store}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy=DecoupledDiLoCoStrategy(INNER[given.inner](), **options),
        max_steps=100_000,
        accumulate_grad_batches=given.accumulate,
        limit_val_batches=0,
        default_root_dir=given.out.parent,
        **QUIET,
    )
    model = Echo(given.out, given.until, given.pause_s)
    trainer.fit(model, text_data(given.data, given.batch_size))


if __name__ == "__main__":
    main()
