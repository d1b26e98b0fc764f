"""Two minutes of a real run under a seeded schedule of real faults: the run ends by itself, is exact, and replays.

The test depends on the speed of the machine in one way only: the first minute of the schedule, which has all kinds of
faults, must be a part of the run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_diloco.cli.faults.schedule import KINDS
from lightning_diloco.cli.main import main
from tests.e2e.recorded import assert_recorded_exactly

FAULTS = ["--faults-per-hour", "400", "--seed", "34", "--shards", "2"]
DURATION = ["--duration", "130s"]  # 20 s of it until the first step
REDUCED = [
    "--trainer.max_steps=100000", "--trainer.val_check_interval=100000", "--data.max_bytes=1000000",
    "--model.config.hidden_size=64", "--model.schedule=constant",
]  # fmt: skip
START_LOSS = 6.93  # ln(vocab_size): loss of an untrained model


@pytest.mark.chaos
def test_a_run_under_faults_of_every_kind_ends_by_itself_exact_and_replays(tmp_path: Path) -> None:
    ours = ["--local", "2", *FAULTS, *DURATION, "--run-dir", str(tmp_path), "--no-table"]
    assert main(["chaos", "tiny/gpt", *ours, *REDUCED]) == 0
    report, summary = (json.loads((tmp_path / name).read_text()) for name in ("chaos.json", "summary.json"))
    assert report["status"] == summary["status"] == "finished"
    assert report["ledger_exact"] is True
    discarded = sum(summary["tokens_discarded"].values())
    assert summary["tokens_seen"] == summary["tokens_merged"] + discarded + summary["tokens_pending"] > 0
    assert report["replayed"] == "merges"
    assert_recorded_exactly(tmp_path)
    assert report["num_faults_by_kind"].keys() == set(KINDS)
    assert report["num_faults"] + report["num_faults_skipped"] >= 7
    assert summary["joins"] > 2, "who was killed came back"
    assert 0.0 < report["step_efficiency"] <= 1.0
    assert report["eval_loss"] < START_LOSS
    assert set(report["longest_gap_s"]) == {"l0", "l1"}
