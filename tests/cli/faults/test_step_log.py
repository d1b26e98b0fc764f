"""The step clock of a chaos run: one time per inner step, a break at validation, and an end at an absolute time."""

from __future__ import annotations

import math
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_diloco.cli.faults.step_log import PATTERN, StepClock, read_steps
from tests.quiet import QUIET

NUM_BATCHES = 6


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path: Path, clock: StepClock, **options: object) -> L.Trainer:
    data = DataLoader(TensorDataset(torch.ones(NUM_BATCHES, 1)))
    own = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "callbacks": [clock], "default_root_dir": tmp_path}
    trainer = L.Trainer(**QUIET, **own, **options)
    trainer.fit(Line(), data, data)
    return trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
def test_every_step_has_a_time_and_validation_is_a_break(tmp_path: Path) -> None:
    began_s = time.time()
    fit(tmp_path, StepClock(), val_check_interval=3)
    (path,) = tmp_path.glob(PATTERN)
    times = read_steps(path)
    assert [math.isnan(t) for t in times] == [False, False, False, True, False, False, False, True]
    steps = [t for t in times if not math.isnan(t)]
    assert steps == sorted(steps)
    assert began_s <= steps[0] <= steps[-1] <= time.time()


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
def test_batches_that_only_accumulate_gradients_are_not_steps(tmp_path: Path) -> None:
    fit(tmp_path, StepClock(), accumulate_grad_batches=2, limit_val_batches=0)
    (path,) = tmp_path.glob(PATTERN)
    assert len(read_steps(path)) == NUM_BATCHES / 2


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
def test_training_ends_by_itself_at_its_time(tmp_path: Path) -> None:
    assert fit(tmp_path, StepClock(until_s=time.time() - 1.0), limit_val_batches=0).global_step == 1


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
def test_training_ends_by_itself_at_its_step(tmp_path: Path) -> None:
    assert fit(tmp_path, StepClock(until_step=4), limit_val_batches=0).global_step == 4


def test_an_incomplete_time_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps-1.f64"
    path.write_bytes(b"\0" * 20)
    assert list(read_steps(path)) == [0.0, 0.0]
