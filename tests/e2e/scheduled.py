"""A Trainer whose learning rate equals the step of its schedule. It writes the rates of its steps to --out."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

import lightning_diloco  # noqa: F401  makes "decoupled_diloco" known to the Trainer
from tests.quiet import QUIET
from tests.strategy.trainer.test_lr_schedules import Scheduled

MAX_STEPS = 100_000  # length of the schedule, which no learner reaches


class Until(Callback):
    """Ends training when a file appears, or after some steps."""

    def __init__(self, stop_file: Path | None, steps: int | None) -> None:
        self._stop_file, self._steps = stop_file, steps

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        is_told = self._stop_file is not None and self._stop_file.exists()
        trainer.should_stop = is_told or (self._steps is not None and trainer.global_step >= self._steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stop-file", type=Path)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(7)  # frozen parameters must equal those of the run
    model = Scheduled()
    model.learning_rate = 1e-9  # the rates keep growing, and losses must not
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=MAX_STEPS,
        limit_val_batches=0,
        callbacks=Until(given.stop_file, given.steps),
        strategy="decoupled_diloco",
        default_root_dir=given.out.with_suffix(""),
        **QUIET,
    )
    trainer.fit(model)
    given.out.write_text(json.dumps(model.rates))


if __name__ == "__main__":
    main()
