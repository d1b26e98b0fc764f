"""The bench of steps on XLA runs; what it says of steps as short as these means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xla, pytest.mark.slow, pytest.mark.thorough]

REPOSITORY = Path(__file__).parents[2]


def test_bench_of_steps_tells_who_computed_how_long(tmp_path: Path) -> None:
    sizes = ["--width", "32", "--depth", "4", "--batch", "8", "--steps", "90", "--warm-up", "80", "--runs", "1"]
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
    rows = {row["run"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert list(rows) == ["without", "with", "control"]
    assert all(min(row["step p50 [ms]"], row["device CPU [ms]"], row["training CPU [ms]"]) > 0 for row in rows.values())
    assert rows["without"]["syncer CPU [ms]"] == 0 < rows["with"]["syncer CPU [ms]"]
    assert 0 < rows["with"]["hook p50 [ms]"] <= rows["with"]["hook p95 [ms]"]
    assert rows["with"]["graphs after warm-up"] == 0
