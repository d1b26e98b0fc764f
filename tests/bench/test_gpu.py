"""The gpu bench, tried on the CPU with small sizes: its parts run to the end, and what they store is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import gpu

pytestmark = pytest.mark.slow


def test_all_parts_are_measured_and_stored(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = ["--accelerator", "cpu", "--tiny", "--rounds", "1", "--turn-s", "4", "--out", str(out)]
    gpu.main([*words, "--parts", "quantizer", "steps", "quality"])  # its bounds are those of a GPU
    found = json.loads(out.read_text())
    assert len(found["checks"]) == 6
    assert [row["run"] for row in found["steps"]] == ["without", "with", "control"]
    plain, ours, _ = found["steps"]
    assert plain["landings per step"] == plain["hooks p95 [s]"] == 0.0
    assert ours["landings per step"] > 0.0 < ours["hooks p95 [s]"]
    assert 4.0 < ours["planned bytes / parameter"] < 5.0, "an anchor, and buffers for a few fragments"
    two, one = (row["loss"] for row in found["quality"])
    assert max(two, one) < 8.95, "both have learned: at random, it is 9.01"
    events = json.loads(out.with_suffix(".trace.json").read_text())["traceEvents"]
    assert any("Optimizer.step" in str(event.get("name")) for event in events)
