"""Finished runs do not fill the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightning_diloco.learner.leftovers import KEPT, tidy
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.transport.address import JoinAddress, write_join_file
from tests.learner.fleet import RUN, Fleet


def finished(run_dir: Path) -> Path:
    with Fleet(run_dir, embedded_by=os.getppid()) as fleet:
        write_join_file(run_dir / "join", JoinAddress("127.0.0.1", 1, RUN, "token", "0" * 64))
        learner = fleet.learner("l0").go()
        fleet.until_commits(4)
        learner.enough().done()
        assert fleet.stop()["status"] == "finished"
    for name in ("join", "summary.json"):
        os.utime(run_dir / name, (1e9, 1e9))
    return run_dir


def older(run: Path, age: int) -> Path:
    copy = run.with_name(f"run-{age}")
    shutil.copytree(run, copy)
    for name in ("join", "summary.json"):
        os.utime(copy / name, (1e9 - age, 1e9 - age))
    return copy


def nbytes(run: Path, part: str = "syncer") -> int:
    return sum(path.stat().st_size for path in (run / part).rglob("*") if path.is_file())


def test_a_finished_run_keeps_one_copy_of_its_state(tmp_path: Path) -> None:
    run = finished(tmp_path)
    numel = 24 * 8 + 16 * 12 + 16
    assert nbytes(run, "syncer/log") == 0
    assert 12 * numel < sum(path.stat().st_size for path in (run / "syncer").rglob("tensors-*")) < 20 * numel + 2000


@pytest.mark.seconds
def test_tensors_of_old_finished_runs_are_removed_and_everything_else_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = finished(tmp_path / "run-0")
    runs = [newest, *(older(newest, age) for age in range(1, KEPT + 2))]
    (tmp_path / "no run").mkdir()
    (tmp_path / "a file").write_text("")
    unfinished = tmp_path / "unfinished"
    with Fleet(unfinished) as fleet:
        fleet.learner("l0").join()
    before = {run: nbytes(run) for run in [*runs, unfinished]}
    served = RedoLog(runs[-1] / "syncer" / "log")
    tidy(tmp_path)
    served.close()
    assert [nbytes(run) for run in (*runs[:KEPT], runs[-1], unfinished)] == [
        before[run] for run in (*runs[:KEPT], runs[-1], unfinished)
    ]
    assert nbytes(runs[KEPT]) == 0
    assert (runs[KEPT] / "summary.json").exists()
    assert nbytes(runs[KEPT], "tape") > 0
    assert f"removed the syncer's tensors of 1 finished runs in {tmp_path} (run-{KEPT})" in caplog.text
    assert "in use" in caplog.text or "served" in caplog.text
    tidy(tmp_path)
    assert nbytes(runs[-1]) == 0
    caplog.clear()
    tidy(tmp_path)
    tidy(tmp_path / "not there")
    assert caplog.text == ""
