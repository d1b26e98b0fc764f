"""A real run is interrupted: its learners leave with a checkpoint, and the same command continues from it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_diloco.storage.tape import read_tape
from tests import command
from tests.cli.line_model import MODEL
from tests.e2e.recorded import assert_recorded_exactly

pytestmark = pytest.mark.slow

WITHIN_S = 240.0
LEARNERS = ("l0", "l1")
# A separate process reads its samples. A signal to all processes would have ended that process, too.
SCRIPT = (
    """
import os, sys, time
from pathlib import Path
import lightning as L
import torch
import lightning_diloco

class Note(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        with (Path(os.environ["DILOCO_RUN_DIR"]) / (os.environ["DILOCO_LEARNER"] + ".steps")).open("a") as notes:
            print(os.getpid(), trainer.global_step, file=notes)
"""
    + MODEL
    + """
data = torch.utils.data.DataLoader(torch.randn(65536, 8), batch_size=4, num_workers=1)
L.Trainer(
    strategy=lightning_diloco.DecoupledDiLoCoStrategy(sync_every=8, num_fragments=2, preemption_s=120.0),
    accelerator="cpu", devices=1, max_steps=int(sys.argv[1]), enable_progress_bar=False, enable_model_summary=False,
    logger=False, enable_checkpointing=False, callbacks=Note(),
).fit(Model(), data)
"""
)


class Run:
    """Runs `diloco run` with the script in one folder, several times."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.dir = folder, folder / "run"
        (folder / "train.py").write_text(SCRIPT)

    def start(self, num_steps: int) -> subprocess.Popen[str]:
        words = ("run", "train.py", "--local", "2", "--run-dir", self.dir, "--no-table", "--no-page")
        return command.start(self._folder, *words, "--stop-grace", 120, "--", num_steps)

    def steps(self, learner: str) -> dict[int, list[int]]:
        """Return the steps of each process of a learner."""
        path = self.dir / f"{learner}.steps"
        lives: dict[int, list[int]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            pid, step = map(int, line.split())
            lives.setdefault(pid, []).append(step)
        return lives

    def tape(self, event: str) -> list[dict[str, Any]]:
        path = self.dir / "tape" / "events.jsonl"
        return [line for line in read_tape(path) if line["event"] == event] if path.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.dir / "summary.json").read_text())
        return content

    @property
    def left_over(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["environ"]) if str(self.dir) in str(p.info["environ"])]


def test_an_interrupted_run_loses_nothing_and_can_be_continued(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.start(num_steps=100_000) as process:
        deadline_s = time.monotonic() + WITHIN_S
        while not {name for line in run.tape("commit")[8:] for name in line["learners"]} >= set(LEARNERS):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=WITHIN_S)

    assert process.returncode == 128 + signal.SIGTERM, said
    assert "SIGTERM: ending the run" in said
    assert "killed" not in said
    assert run.left_over == []
    assert [line["reason"] for line in run.tape("leave")] == ["preempted", "preempted"]
    last = {}
    for name in LEARNERS:
        assert "the run was left with a checkpoint" in (run.dir / "learners" / name / "log.txt").read_text()
        ((*_, last[name]),) = run.steps(name).values()
    summary = run.summary
    assert summary["status"] == "interrupted"
    assert summary["ledger_exact"]
    assert_recorded_exactly(run.dir)
    # Samples of each step in each of two fragments; the step at which the signal came is one of them.
    assert summary["tokens_seen"] == summary["tokens_merged"] == sum(last.values()) * 4 * 2

    with run.start(num_steps=max(last.values()) + 20) as process:
        said, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, said
    for name in LEARNERS:
        _, (first, *_, end) = run.steps(name).values()
        assert first == last[name] + 1, "it goes on where it left"
        assert end == max(last.values()) + 20
    summary = run.summary
    assert summary["status"] == "finished"
    assert summary["ledger_exact"]
    assert_recorded_exactly(run.dir)
    assert summary["joins"] == 4
