"""The gpu bench on the CPU with small sizes: all parts run to their end, and their results are complete."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch

from tests.bench import gpu
from tests.bench.gpu_learner import PartOfGpu
from tests.bench.report import ROOT


@pytest.mark.slow
def test_all_parts_are_measured_and_stored(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = ["--accelerator", "cpu", "--tiny", "--rounds", "1", "--turn-s", "4", "--out", str(out)]
    gpu.main([*words, "--parts", "quantizer", "steps", "quality"])  # its bounds are those of a GPU
    found = json.loads(out.read_text())
    assert len(found["checks"]) == 9
    assert {"commit", "torch", "lightning"} <= found["circumstances"].keys()
    assert [*found["seconds"]] == ["quantizer", "steps", "quality"]
    assert [row["run"] for row in found["steps"]] == ["without", "with", "control"]
    plain, ours, _ = found["steps"]
    assert plain["landings per step"] == plain["hooks p95 [s]"] == 0.0
    assert ours["landings per step"] > 0.0 < ours["hooks p95 [s]"]
    assert 4.0 < ours["planned bytes / parameter"] < 5.0, "an anchor, and buffers for a few fragments"
    two, one = found["quality"]
    assert max(two["loss"], one["loss"]) < 8.95, "both have learned: at random, it is 9.01"
    assert min(two["loss at half"], one["loss at half"]) > 8.95
    assert (two["part of memory"], one["part of memory"]) == (0.5, 1.0)
    events = json.loads(gzip.decompress(out.with_suffix(".trace.json.gz").read_bytes()))["traceEvents"]
    assert any("Optimizer.step" in str(event.get("name")) for event in events)


def test_a_learner_has_its_part_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    for device in map(torch.device, ("cpu", "cuda:1")):
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
        PartOfGpu(0.5, str(tmp_path)).setup(trainer, L.LightningModule(), "fit")
    assert limits == [(0.5, torch.device("cuda:1"))]


def test_all_tests_that_need_a_gpu_are_run() -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.gpu\b", path.read_text())]
    assert marked
    assert all(path.relative_to(ROOT).as_posix().startswith(gpu.TESTS) for path in marked)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="they pass on a GPU")
def test_the_tests_of_a_gpu_fail_without_one() -> None:
    assert gpu.main(["--accelerator", "cpu", "--parts", "tests"]) == 1


def test_overlap_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--accelerator", "cpu"])
    assert "the part overlap reads the trace" in capsys.readouterr().err


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
    out = tmp_path / "gpu.json"
    out.with_suffix(".trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    with patch.object(gpu, "TRACED", 2):
        assert gpu.main(["--accelerator", "cpu", "--parts", "overlap", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["checks"] == {"60% of the exchanges' kernels run beside training, at least 50%": True}
    (row,) = found["overlap"]
    assert row.pop("run") == "with"
    assert row == pytest.approx(
        {
            "training [ms/step]": 1.8,
            "kernels of exchanges [ms/step]": 0.5,
            "kernels beside training": 0.6,
            "copies of exchanges [ms/step]": 0.15,
            "copies beside training": 0.0,
        }
    )
    assert out.with_suffix(".svg").stat().st_size > 1000
