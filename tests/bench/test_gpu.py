"""The gpu bench on the CPU with small sizes: all parts run to their end, and their results are complete."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.bench import gpu, timeline


@pytest.mark.slow
def test_all_parts_are_measured_and_stored(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = ["--accelerator", "cpu", "--tiny", "--rounds", "1", "--turn-s", "4", "--out", str(out)]
    gpu.main([*words, "--parts", "quantizer", "steps", "quality"])  # its bounds are those of a GPU
    found = json.loads(out.read_text())
    assert len(found["checks"]) == 7
    assert [row["run"] for row in found["steps"]] == ["without", "with", "control"]
    plain, ours, _ = found["steps"]
    assert plain["landings per step"] == plain["hooks p95 [s]"] == 0.0
    assert ours["landings per step"] > 0.0 < ours["hooks p95 [s]"]
    assert 4.0 < ours["planned bytes / parameter"] < 5.0, "an anchor, and buffers for a few fragments"
    two, one = (row["loss"] for row in found["quality"])
    assert max(two, one) < 8.95, "both have learned: at random, it is 9.01"
    events = json.loads(gzip.decompress(out.with_suffix(".trace.json.gz").read_bytes()))["traceEvents"]
    assert any("Optimizer.step" in str(event.get("name")) for event in events)


def test_times_of_a_trace(tmp_path: Path) -> None:
    def event(cat: str, stream: int, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "ts": 1e6 + ts, "dur": dur, "args": {"stream": stream}}

    events = [
        event("kernel", 7, 0, 1000),
        event("kernel", 7, 900, 600),  # training: 0..1500 and 2000..4000 us
        event("kernel", 7, 2000, 2000),
        event("kernel", 13, 1000, 1000),  # half of it beside training
        event("gpu_memcpy", 13, 4500, 300),
        event("gpu_memcpy", 7, 1500, 100),  # a batch
        {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 9e9},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = timeline.Timeline(path)
    assert found.row(num_steps=2) == pytest.approx(
        {
            "training [ms/step]": 1.8,
            "kernels of exchanges [ms/step]": 0.5,
            "kernels beside training": 0.6,
            "copies of exchanges [ms/step]": 0.15,
            "copies beside training": 0.0,
        }
    )
    found.draw(tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").stat().st_size > 1000
