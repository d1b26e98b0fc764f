"""Real processes that lose contact with each other or lose their disk, and how they return."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from lightning_diloco.storage.tape import read_tape
from tests.e2e.conftest import Processes, until
from tests.e2e.learner import TOKENS
from tests.e2e.recorded import assert_recorded_exactly
from tests.e2e.test_processes import NUM_FRAGMENTS, assert_exact, restored

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def events(processes: Processes) -> list[str]:
    return [line["event"] for line in read_tape(processes.run_dir / "tape" / "events.jsonl")]


def kill(processes: Processes, process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    processes.end(process)


def test_a_learner_many_versions_behind_catches_up_and_keeps_its_tokens(processes: Processes) -> None:
    syncer = processes.syncer(2)
    learners = {name: processes.learner(name) for name in ("stays", "sleeps")}
    until(lambda: processes.status()["num_commits"] >= 8, "commits", processes)
    os.kill(learners["sleeps"].pid, signal.SIGSTOP)

    def sleeper() -> dict:
        return next(m for m in processes.status()["learners"] if m["id"] == "sleeps")

    until(lambda: sleeper()["phase"] == "lapsed", "the lapse", processes)
    until(lambda: sleeper()["staleness_versions"] > 8, "versions it does not know", processes)
    os.kill(learners["sleeps"].pid, signal.SIGCONT)
    until(lambda: sleeper()["phase"] == "stepping" and sleeper()["staleness_versions"] <= 1, "its return", processes)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners.values(), syncer)] == [0, 0, 0]
    summary, held = processes.summary(), [processes.held(name) for name in learners]
    assert (summary["lapses"], summary["joins"]) == (1, 2)
    assert summary["tokens_merged"] == summary["tokens_seen"] == sum(h["steps"] for h in held) * TOKENS * NUM_FRAGMENTS
    assert_exact(summary)
    assert_recorded_exactly(processes.run_dir)
    versions, digests = restored(processes.run_dir, processes.root / "copy")
    for h in held:
        assert all(h["digests"][p] == digests[p] for p in range(NUM_FRAGMENTS) if h["landed"][p] == versions[p])


def test_learners_ahead_of_a_restored_run_directory_adopt_it_in_a_new_generation(processes: Processes) -> None:
    first = processes.syncer(2)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    until(lambda: processes.status()["num_commits"] >= 8, "commits", processes)
    os.kill(first.pid, signal.SIGSTOP)  # for a consistent copy
    shutil.copytree(processes.run_dir, processes.root / "backup")
    os.kill(first.pid, signal.SIGCONT)
    processes.until_commits(12)
    kill(processes, first)
    shutil.rmtree(processes.run_dir)
    shutil.copytree(processes.root / "backup", processes.run_dir)
    second = processes.syncer(2)
    processes.until_commits(8)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, second)] == [0, 0, 0]
    summary, held = processes.summary(), [processes.held(name) for name in ("l0", "l1")]
    assert "regenerated" in events(processes)
    assert set(summary["tokens_discarded"]) == {"restored"}
    assert summary["tokens_seen"] == sum(h["steps"] for h in held) * TOKENS * NUM_FRAGMENTS
    assert_exact(summary)
    assert_recorded_exactly(processes.run_dir)
    versions, digests = restored(processes.run_dir, processes.root / "copy")
    last = next(h for h in held if h["is_last"])
    assert (last["landed"], tuple(last["digests"])) == (versions, digests)


def test_a_run_whose_disk_was_emptied_begins_anew_only_on_request(processes: Processes) -> None:
    first = processes.syncer()
    trained = processes.learner("l0")
    until(lambda: processes.status()["num_commits"] >= 4, "commits", processes)
    kill(processes, first)
    shutil.rmtree(processes.run_dir / "syncer" / "log")
    shutil.rmtree(processes.run_dir / "syncer" / "snapshot")
    refused = processes.start("refused", "-m", "lightning_diloco.cli.main", "syncer", "--run-dir", processes.run_dir)
    assert processes.end(refused) != 0
    assert "has lost a part of a run that learners know" in processes.logs()

    second = processes.syncer(None, reseed=True)
    assert processes.end(trained) == 3, "it is told, and does not seed the run with what it has"
    assert "whose syncer does not know it" in processes.logs()
    assert processes.status()["num_commits"] == 0
    anew = processes.learner("l1")
    processes.until_commits(4)
    processes.stop_file.touch()
    assert processes.end(anew) == 0
    second.terminate()
    assert processes.end(second) == 0
    summary = processes.summary()
    assert summary["tokens_seen"] == processes.held("l1")["steps"] * TOKENS * NUM_FRAGMENTS
    assert_exact(summary)
