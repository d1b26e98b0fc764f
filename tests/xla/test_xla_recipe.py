"""The tiny recipe on XLA: another accelerator and fewer steps, nothing else changed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xla, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS = 48


def test_tiny_recipe_learns_on_xla(tmp_path: Path) -> None:
    words = ["run", "recipes/tiny/gpt.yaml", "--local", "1", "--run-dir", str(tmp_path / "run"), "--no-table"]
    changed = ["--trainer.accelerator", "xla", "--trainer.max_steps", str(NUM_STEPS)]
    ended = subprocess.run(
        [sys.executable, "-m", "lightning_diloco.cli.main", *words, *changed],
        check=False,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["ledger_exact"]) == ("finished", True)
    assert summary["tokens_seen"] == 12 * NUM_STEPS * 16 * 128  # fragments, steps, batch size, length
    assert summary["tokens_merged"] > 0.5 * summary["tokens_seen"]
    assert summary["eval_loss"] < math.log(512) - 1  # of 512 tokens, equally likely
    log = (tmp_path / "run" / "learners" / "l0" / "log.txt").read_text()
    assert "anchor_device='device': anchors take" in log  # said on XLA devices only
