"""`diloco run` with real learners and a real syncer: an ordinary script, two learners, one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import command

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "recipes" / "tiny"
# The script uses this package only in the import and the strategy, and records the samples it sees.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
import lightning_diloco

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []
    def training_step(self, batch, batch_idx):
        self.seen += batch.flatten().int().tolist()
        after_step(self)
        return (self.layer(batch / 64) - batch / 64).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.layer(batch / 64) - batch / 64).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def after_step(model): ...
AFTER_STEP
L.seed_everything(1)
data = torch.arange(64.0).unsqueeze(1)
train = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
trainer = L.Trainer(
    strategy=lightning_diloco.DecoupledDiLoCoStrategy(sync_every=4, num_fragments=1, overlap=1),
    accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False, enable_model_summary=False,
    log_every_n_steps=4, logger=CSVLogger("logs"), callbacks=ModelCheckpoint("kept", save_last=True),
)
model = Model()
trainer.fit(model, train, torch.utils.data.DataLoader(data, batch_size=64))
Path(trainer.default_root_dir, "seen.json").write_text(json.dumps(model.seen))
"""
DIE_ONCE = """
def after_step(model):
    marker = Path(os.environ["DILOCO_RUN_DIR"], "died")
    if os.environ["DILOCO_LEARNER"] == "l1" and len(model.seen) == 16 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
FAIL = "def after_step(model): raise ValueError('the data is broken')"


class Run:
    """Runs `diloco run` with a script to its end."""

    def __init__(self, folder: Path, script: str | Path, *words: str) -> None:
        if isinstance(script, str):
            (folder / "train.py").write_text(script)
            script = folder / "train.py"
        self.dir = folder / "run"
        here = folder / "here"
        here.mkdir()
        ended = command.run(here, "run", script, "--local", 2, "--run-dir", self.dir, "--no-table", *words)
        self.exit_code, self.said = ended.returncode, ended.stdout + ended.stderr
        self.written_elsewhere = list(here.iterdir())
        self.left_over = [
            p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())
        ]

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.dir / "summary.json").read_text())
        return content

    def of(self, learner: str, name: str) -> Any:
        return json.loads((self.dir / "learners" / learner / name).read_text())


def test_two_learners_of_one_script_read_different_samples_and_write_to_different_folders(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT.replace("AFTER_STEP", ""))
    assert run.exit_code == 0, run.said
    seen = [run.of(learner, "seen.json") for learner in ("l0", "l1")]
    assert [len(indices) for indices in seen] == [32, 32]
    assert sorted(seen[0] + seen[1]) == list(range(64))
    for learner in ("l0", "l1"):
        folder = run.dir / "learners" / learner
        assert (folder / "kept" / "last.ckpt").is_file()
        assert (folder / "logs" / "lightning_logs" / "version_0" / "metrics.csv").is_file()
    assert run.written_elsewhere == []
    assert run.left_over == []
    summary = run.summary
    assert summary["status"] == "finished"
    assert summary["tokens_seen"] == summary["tokens_merged"] == 64
    assert summary["eval_loss"] is not None
    assert "eval_loss of the anchor" in run.said
    assert "no answer" not in run.said


def test_shards_of_the_syncer_are_started_and_end_with_it(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT.replace("AFTER_STEP", "").replace("num_fragments=1", "num_fragments=2"), "--shards", "2")
    assert run.exit_code == 0, run.said
    assert run.summary["status"] == "finished"
    assert run.summary["tokens_seen"] == run.summary["tokens_merged"] == 2 * 64  # tokens of each fragment
    assert (run.dir / "syncer" / "shards" / "1" / "log").is_dir()
    assert run.left_over == []


def test_a_killed_learner_is_restarted_and_the_run_finishes(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT.replace("AFTER_STEP", DIE_ONCE))
    assert run.exit_code == 0, run.said
    assert "l1 died (signal SIGKILL); restart 1 of 3" in run.said
    assert run.summary["joins"] == 3, run.said
    assert run.summary["status"] == "finished"
    assert run.left_over == []


def test_a_script_that_fails_fails_the_run_and_is_quoted(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT.replace("AFTER_STEP", FAIL), "--max-restarts", "1")
    assert run.exit_code == 1
    assert "died (exit code 1: ValueError: the data is broken); restart 1 of 1" in run.said
    assert run.said.count("    ValueError: the data is broken") == 2
    assert run.left_over == []


@pytest.mark.thorough
def test_the_example_script_runs_under_a_launcher(tmp_path: Path) -> None:
    run = Run(tmp_path, TINY / "train.py", "--max-steps", "6")
    assert run.exit_code == 0, run.said
    assert run.summary["eval_loss"] is not None
    assert run.written_elsewhere == []
    assert run.left_over == []
