"""A run directory with a handwritten tape: two learners, one of which dies and joins again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

START = 1_000_000.0


def learner(name: str, phase: str, step: int, loss: float | None = None) -> dict[str, Any]:
    return {"id": name, "phase": phase, "step": step, "tokens": 10 * step, "tokens_per_s": 10.0,
            "staleness_versions": 0, "loss": loss}  # fmt: skip


def progress(t: float, up: int, *learners: dict[str, Any], goodput: float | None = 0.5) -> dict[str, Any]:
    tokens = sum(one["tokens"] for one in learners)
    return {"t": START + t, "event": "progress", "lsn": 1, "fleet_tokens": tokens, "goodput": goodput,
            "participation": 1.0, "bytes_up": up, "bytes_down": 2 * up, "learners": list(learners)}  # fmt: skip


def event(t: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"t": START + t, "event": name, "lsn": 1, **fields}


def commit(t: float, fragment: int, version: int, *names: str) -> dict[str, Any]:
    figures = {"num_stepping": 2, "quorum_s": 0.1, "collect_s": 0.2, "round_s": 0.3}
    contributions = {"learners": list(names), "tokens": [1], "steps": [1], "staleness": [0] * len(names)}
    return event(t, "commit", fragment=fragment, version=version, round=version, **contributions, **figures)


LINES = [
    event(0, "seeded", lease=1),
    event(1, "join", learner="l0", incarnation=1, where="here:1"),
    event(1, "join", learner="l1", incarnation=1, where="here:2"),
    progress(2, 100, learner("l0", "stepping", 2, 5.0), learner("l1", "stepping", 2, 5.0), goodput=None),
    commit(3, 0, 1, "l0", "l1"),
    progress(4, 200, learner("l0", "stepping", 4, 4.0), learner("l1", "stepping", 4, 4.0)),
    progress(6, 300, learner("l0", "evaluating", 6, 3.5), learner("l1", "stalled", 4, 4.0)),
    event(7, "join", learner="l1", incarnation=2, where="here:3"),
    progress(8, 280, learner("l0", "stepping", 8, 3.0), learner("l1", "stepping", 2, 3.2)),  # of the next syncer
    commit(9, 1, 1, "l0"),
    event(10, "leave", learner="l0", reason="finished", tokens=100),
    progress(11, 340, learner("l0", "left", 10, 2.0), learner("l1", "stepping", 4, 2.5)),
    event(12, "lapse", learner="l1", silent_s=0.5),
]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory: the lines of its tape, and metrics.csv of each process of l1."""

    def make(lines: list[dict[str, Any]] = LINES, *csv_files: str) -> Path:
        run_dir = tmp_path / "run"
        (run_dir / "tape").mkdir(parents=True)
        (run_dir / "tape" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for number, text in enumerate(csv_files):
            folder = run_dir / "learners" / "l1" / "lightning_logs" / f"version_{number}"
            folder.mkdir(parents=True)
            (folder / "metrics.csv").write_text(text)
        return run_dir

    return make
