"""The bench of steps on XLA runs; its results for such short steps have no meaning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xla, pytest.mark.slow, pytest.mark.thorough]

REPOSITORY = Path(__file__).parents[2]


def test_bench_of_steps_reports_the_cpu_times_of_all_parts(tmp_path: Path) -> None:
    sizes = ["--width", "32", "--depth", "4", "--batch", "8", "--rounds", "1", "--turn-s", "6", "--warm-up", "2000"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.xla_step", *sizes, "--out", str(tmp_path / "found.json")],
        check=False,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    plain, ours, *control = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["run"] for row in control] == ["without", "control"]
    for row in (plain, ours, *control):
        assert min(row["step p50 [ms]"], row["device CPU [ms]"], row["training CPU [ms]"]) > 0
    assert plain["syncer CPU [ms]"] == plain["landings per step"] == 0
    assert min(ours["syncer CPU [ms]"], ours["landings per step"]) > 0
    assert 0 < ours["hooks p50 [ms]"] <= ours["hooks p95 [ms]"]
    assert ours["graphs after warm-up"] == 0
