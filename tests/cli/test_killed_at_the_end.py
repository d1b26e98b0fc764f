"""A real learner is killed while it validates the final anchor: it is restarted, and finds that the run is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import command
from tests.cli.line_model import MODEL

# The last learner to leave validates. Its next process starts when the run is over, as on machines with slow imports.
SCRIPT = (
    """
import os, signal, sys, time
from pathlib import Path
import lightning as L
import torch
import lightning_diloco

run_dir = Path(os.environ["DILOCO_RUN_DIR"])
killed = run_dir / (os.environ["DILOCO_LEARNER"] + ".killed")
while killed.exists() and not (run_dir / "summary.json").exists():
    time.sleep(0.05)
"""
    + MODEL
    + """
class Killed(Model):
    def validation_step(self, batch, batch_idx):
        if self.trainer.strategy.membership is None:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

data = torch.utils.data.DataLoader(torch.randn(4096, 8), batch_size=4)
L.Trainer(
    strategy=lightning_diloco.DecoupledDiLoCoStrategy(sync_every=8, num_fragments=2),
    accelerator="cpu", devices=1, max_steps=40, val_check_interval=1000, check_val_every_n_epoch=None,
    num_sanity_val_steps=0, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False,
).fit(Killed(), data, data)
"""
)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_learner_that_restarts_after_the_end_of_the_run_exits_at_once_with_code_0(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("run", "train.py", "--local", 2, "--run-dir", "run", "--no-table", "--no-page")
    printed = command.succeed(tmp_path, *words)
    (killed,) = (path.stem for path in (tmp_path / "run").glob("*.killed"))
    assert f"{killed} died (signal SIGKILL); restart 1 of 3" in printed
    said = (tmp_path / "run" / "learners" / killed / "log.txt").read_text()
    assert "has finished, nothing is left to train" in said
    assert "trying for another" not in said, "it did not look for a syncer"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["ledger_exact"], summary["eval_loss"]) == ("finished", True, None)
