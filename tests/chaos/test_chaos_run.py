"""A real run under a seeded schedule of real faults: it ends by itself, exact, and comes out again from its disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_diloco.cli.main import main

REDUCED = [
    "--trainer.max_steps=100000", "--trainer.val_check_interval=100000", "--data.max_bytes=1000000",
    "--model.config.hidden_size=64", "--model.schedule=constant",
]  # fmt: skip


@pytest.mark.chaos
def test_a_run_under_faults_ends_by_itself_with_an_exact_ledger(tmp_path: Path) -> None:
    ours = ["--local", "2", "--faults-per-hour", "480", "--duration", "80s", "--seed", "3", "--run-dir", str(tmp_path)]
    assert main(["chaos", "tiny/gpt", *ours, "--no-table", *REDUCED]) == 0
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert report["status"] == "finished"
    assert report["ledger_exact"] is True
    assert report["replayed"] == "merges"
    assert report["num_faults"] >= 3
    assert 0.5 < report["step_efficiency"] <= 1.0
    assert report["eval_loss"] < 7.0  # ln(vocab_size) is 6.93: it has learned
    assert set(report["longest_gap_s"]) == {"l0", "l1"}
