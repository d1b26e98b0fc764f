"""Two learners with models from different seeds: exchanged state becomes one model, other state stays local."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import command

pytestmark = pytest.mark.slow

State = dict[str, torch.Tensor]

# A teacher, a backbone that is frozen at first, statistics of BatchNorm, an optimizer with copies.
SCRIPT = """
import copy, os, time
import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
import lightning_diloco
from tests.strategy.optimizers import ScheduleFree

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
    def training_step(self, batch, batch_idx):
        (x,) = batch
        time.sleep(0.01)
        hidden = self.backbone(x)
        return (self.student(hidden) - x[:, :4]).square().mean() + (self.student(x) - self.teacher(x)).square().mean()
    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters()):
                mine.lerp_(theirs, 0.05)
    def configure_optimizers(self):
        return ScheduleFree([p for p in self.parameters() if p.requires_grad], lr=0.1)

L.seed_everything(ord(os.environ["DILOCO_LEARNER"][-1]))
data = torch.utils.data.TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(0)))
trainer = L.Trainer(
    strategy=lightning_diloco.DecoupledDiLoCoStrategy(sync_every=6, num_fragments=2, overlap=1, checkpoint_every=10),
    accelerator="cpu", devices=1, max_epochs=10, enable_progress_bar=False, enable_model_summary=False, logger=False,
    enable_checkpointing=False, callbacks=BackboneFinetuning(3, lambda_func=lambda epoch: 1.0),
)
model = Model()
start = copy.deepcopy(model.state_dict())
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
torch.save({"state": model.state_dict(), "start": start}, os.path.join(trainer.default_root_dir, "end.pt"))
"""


def test_learners_with_teachers_and_backbones_become_one_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command.succeed(tmp_path, "run", "train.py", "--local", 2, "--run-dir", "run", "--no-table")
    run_dir = tmp_path / "run"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["ledger_exact"]
    assert summary["tokens_merged"] == summary["tokens_seen"]
    first, second = (torch.load(run_dir / "learners" / name / "end.pt") for name in ("l0", "l1"))
    a, b = first["state"], second["state"]
    exchanged = [n for n in a if n.startswith(("student", "backbone.0", "backbone.1.weight", "backbone.1.bias"))]
    began = apart(first["start"], second["start"], exchanged)
    assert began > 1.0, "they were built from different seeds"
    assert apart(a, b, exchanged) < 0.1 * began  # the learner that left first has an anchor that is some versions older
    assert apart(a, first["start"], ["backbone.0.weight"]) > 0.1
    for state in (a, b):
        student = {name.replace("student", "teacher"): value for name, value in state.items()}
        assert apart(state, student, [n for n in state if n.startswith("teacher")]) < 0.3 * began
    assert not torch.equal(a["backbone.1.running_mean"], b["backbone.1.running_mean"]), "statistics are each one's own"


def apart(one: State, other: State, names: list[str]) -> float:
    return torch.stack([(one[name] - other[name]).norm() for name in names]).norm().item()
