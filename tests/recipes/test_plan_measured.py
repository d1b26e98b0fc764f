"""The forecast of `diloco plan` agrees with a real run within 15 %."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.storage.tape import read_tape
from tests import command

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny" / "gpt.yaml"
NUM_LEARNERS, NUM_STEPS = 2, 480  # long, so that the drain has little weight
TOLERANCE = 0.15

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    overrides = ("--trainer.max_steps", NUM_STEPS, "--trainer.limit_val_batches", 2)
    command.succeed(folder, "run", RECIPE, "--local", NUM_LEARNERS, "--run-dir", "run", "--", *overrides)
    return folder / "run"


@pytest.fixture(scope="module")
def summary(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def planned(run_dir: Path) -> dict[str, Any]:
    options = ("--learners", NUM_LEARNERS, "--max-steps", NUM_STEPS, "--json")
    content: dict[str, Any] = json.loads(command.succeed(run_dir, "plan", RECIPE, *options, PYTHONWARNINGS="ignore"))
    return content


def close(predicted: float, measured: float) -> bool:
    return abs(predicted - measured) <= TOLERANCE * measured


def test_the_fragments_are_those_of_the_run(planned: dict[str, Any], summary: dict[str, Any]) -> None:
    assert planned["num_fragments"] == len(summary["versions"])


def test_bytes_of_a_contribution(planned: dict[str, Any], summary: dict[str, Any], run_dir: Path) -> None:
    commits = [line for line in read_tape(run_dir / "tape" / "events.jsonl") if line["event"] == "commit"]
    merged = sum(len(line["learners"]) for line in commits)
    start_values = 4 * planned["parameters"]
    assert close(planned["fragment_bytes_up"], (summary["bytes_up"] - start_values) / merged)


def test_rounds(planned: dict[str, Any], summary: dict[str, Any]) -> None:
    assert close(planned["totals"]["rounds"], summary["rounds"])


@pytest.mark.parametrize("way", ["bytes_up", "bytes_down"])
def test_traffic(planned: dict[str, Any], summary: dict[str, Any], way: str) -> None:
    assert close(planned["totals"][way], summary[way])


def test_size_of_the_redo_log(planned: dict[str, Any], run_dir: Path) -> None:
    log_bytes = sum(path.stat().st_size for path in (run_dir / "syncer" / "log").glob("*.log"))
    assert close(planned["totals"]["log_bytes"], log_bytes)


def test_size_of_a_snapshot(planned: dict[str, Any], run_dir: Path) -> None:
    first, last = sorted(path for path in (run_dir / "syncer" / "snapshot").iterdir() if path.is_dir())
    # The first snapshot is taken at version 0, when there are no updates to keep, and the last one at the end.
    sizes = [sum(path.stat().st_size for path in folder.rglob("*.safetensors")) for folder in (first, last)]
    assert close(12 * planned["parameters"], sizes[0])
    assert close(planned["memory"]["disk"]["three snapshots"] / 3, sizes[1])
