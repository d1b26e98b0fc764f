"""A cheap learner with the real Trainer and strategy, which sleeps in each step.

It implements two controls. With `--leaker` (soak bench), the learner of that name keeps an object from every step. With
`--waits` (survivors bench), no step begins while the syncer is unreachable.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.cli.faults.step_log import StepClock
from tests.bench.sleeper import Sleeping
from tests.quiet import QUIET

WIDTH = 64
NUM_SAMPLES = 256  # few, because each epoch allocates its order, and a memory bench needs many epochs


class Leaking(Sleeping):
    """A sleeping model that can leak some bytes in every step.

    Args:
        num_matrices: number of matrices of width WIDTH.
        step_s: sleep time per step.
        leak_bytes: bytes leaked per step.
    """

    def __init__(self, num_matrices: int, step_s: float, leak_bytes: int) -> None:
        super().__init__(num_matrices * WIDTH**2, WIDTH, step_s)
        self._kept: list[bytes] = []
        self._leak_bytes = leak_bytes

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._leak_bytes:
            self._kept.append(bytes(self._leak_bytes))
        return super().training_step(batch, batch_idx)


class Dense(Sleeping):
    """A sleeping model whose steps move all of its matrices, so that learners of different speeds move alike."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self._step_s)
        noise = torch.randn(len(self.matrices), generator=self._own)
        return torch.stack([matrix.sum() for matrix in self.matrices]).mul(batch.mean() + 0.1 * noise).sum()


class EndWith(L.Callback):
    """Ends training when a file appears."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop |= self._path.exists()


class WaitForSyncer(L.Callback):
    """Waits for the syncer before each step, which a learner must not do."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        while not trainer.strategy._present.link._control.is_online:
            time.sleep(0.001)


def main() -> None:
    """Train until the given time or file."""
    parser = argparse.ArgumentParser(description=__doc__)
    until = parser.add_mutually_exclusive_group(required=True)
    until.add_argument("--until-s", type=float, help="unix seconds")
    until.add_argument("--until-file", type=Path, help="a file whose appearance ends training")
    parser.add_argument("--matrices", type=int, default=48, help=f"number of matrices of the model, {WIDTH} x {WIDTH}")
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument(
        "--dense", type=int, metavar="WIDTH", help="each step moves all matrices, which have this width"
    )
    parser.add_argument("--slow", help="learner id whose steps take four times as long")
    parser.add_argument("--leaker", help="learner id that leaks")
    parser.add_argument("--leak-bytes", type=int, default=0, help="bytes leaked per step")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without the strategy")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    trainer = L.Trainer(
        strategy="auto" if args.plain else DecoupledDiLoCoStrategy(sync_every=24, num_fragments=4),
        callbacks=[
            *([WaitForSyncer()] if args.waits else []),
            EndWith(args.until_file) if args.until_file else StepClock(args.until_s),
        ],
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        **QUIET,
    )
    step_s = args.step_s * (4 if args.slow is not None and args.slow == os.environ.get("DILOCO_LEARNER") else 1)
    leaks = args.leaker is not None and args.leaker == os.environ.get("DILOCO_LEARNER")
    module: Sleeping = Leaking(args.matrices, step_s, args.leak_bytes if leaks else 0)
    if args.dense:
        module = Dense(args.matrices * args.dense**2, args.dense, step_s)
    trainer.fit(module, DataLoader(torch.ones(NUM_SAMPLES, 1), batch_size=1))


if __name__ == "__main__":
    main()
