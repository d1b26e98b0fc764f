"""One XLA learner and one plain CPU learner, with different batch sizes, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_diloco.learner.embedded_syncer import EmbeddedSyncer
from tests.xla.learner import NUM_JOINT_COMMITS, joint_commits

pytestmark = [pytest.mark.xla, pytest.mark.slow, pytest.mark.thorough]

REPOSITORY = Path(__file__).parents[2]
LEARNERS = {"tpu-vm": ("xla", 8), "laptop": ("cpu", 16)}


def test_xla_and_cpu_train_one_model(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tape = run_dir / "tape" / "events.jsonl"
    syncer = EmbeddedSyncer(run_dir)
    started = {}
    for name, (accelerator, batch_size) in LEARNERS.items():
        argv = ["-m", "tests.xla.learner", accelerator, str(batch_size), str(tape), str(tmp_path / name)]
        environment = {"PJRT_DEVICE": "CPU", "DILOCO_LEARNER": name, "DILOCO_JOIN": (run_dir / "join").read_text()}
        with (tmp_path / f"{name}.txt").open("w") as log:
            started[name] = subprocess.Popen(
                [sys.executable, *argv], env={**os.environ, **environment}, cwd=REPOSITORY, stdout=log, stderr=log
            )
    try:
        codes = {name: process.wait(timeout=300) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
        syncer.let_go(was_joined=True, is_last=True)
    assert codes == {"tpu-vm": 0, "laptop": 0}, {n: (tmp_path / f"{n}.txt").read_text()[-3000:] for n in codes}

    results = {name: json.loads((tmp_path / name).read_text()) for name in LEARNERS}
    assert all(result["val_losses"][-1] < 0.5 * result["val_losses"][0] for result in results.values())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["joins"] == 2
    assert summary["tokens_merged"] > 0
    learned = {learner["id"]: learner["tokens"] for learner in summary["learners"]}
    assert learned == {name: results[name]["steps"] * batch_size for name, (_, batch_size) in LEARNERS.items()}
    joint = joint_commits(tape)
    assert len(joint) >= NUM_JOINT_COMMITS
    assert {learner for event in joint for learner in event["learners"]} == set(LEARNERS)
    assert any(event["tokens"][0] != event["tokens"][1] for event in joint)
