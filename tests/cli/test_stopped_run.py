"""Early stopping on the anchor's loss in an ordinary recipe ends the whole run: all learners stop, drain and leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lightning_diloco.storage.tape import read_tape
from tests import command

RECIPE = Path(__file__).parents[2] / "recipes" / "diffusion" / "video.yaml"
MAX_STEPS, CHECK_EVERY = 5000, 20


@pytest.mark.slow
def test_early_stopping_on_the_anchor_ends_the_run_of_both_learners(tmp_path: Path) -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    stopping = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "val/loss", "stopping_threshold": 1.6, "patience": 1000},  # 1.9 at the start
    }
    recipe["trainer"] |= {"max_steps": MAX_STEPS, "val_check_interval": CHECK_EVERY, "callbacks": [stopping]}
    recipe["data"]["init_args"] |= {"num_val_clips": 32}
    (tmp_path / "video_dit.py").write_bytes(RECIPE.with_name("video_dit.py").read_bytes())
    (tmp_path / "stopping.yaml").write_text(yaml.safe_dump(recipe))

    command.succeed(tmp_path, "run", "stopping.yaml", "--local", 2, "--run-dir", "run", "--no-table")

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert "Stopping threshold reached" in summary["stopped"]
    assert [learner["phase"] for learner in summary["learners"]] == ["left", "left"]
    assert all(learner["step"] < MAX_STEPS for learner in summary["learners"])
    discarded = sum(summary["tokens_discarded"].values())
    assert summary["tokens_seen"] == summary["tokens_merged"] + discarded + summary["tokens_pending"]
    assert summary["tokens_pending"] == 0
    assert summary["eval_loss"] < 1.6
    (stopped,) = [line for line in read_tape(tmp_path / "run" / "tape" / "events.jsonl") if line["event"] == "stopped"]
    assert stopped["learner"] in ("l0", "l1")
