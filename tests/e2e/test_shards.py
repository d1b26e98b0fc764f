"""A run with shards as processes, over Flight with TLS: it survives the death of each of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from lightning_diloco.errors import AuthError
from lightning_diloco.learner.rotation import rotate
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer.replay import replay
from lightning_diloco.syncer.shards.whole import read_run
from tests.e2e.conftest import Processes, until
from tests.e2e.learner import TOKENS
from tests.e2e.recorded import assert_recorded_exactly
from tests.e2e.test_processes import NUM_FRAGMENTS, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def shards(syncer: int) -> dict[str, psutil.Process]:
    """Return the processes of the shards, by the argument with their number."""
    found = {}
    for child in psutil.Process(syncer).children():
        with suppress(psutil.Error):  # it ends
            argv = child.cmdline()
            if "--shard" in argv:
                found[argv[argv.index("--shard") + 1]] = child
    return found


def assert_nothing_lost(processes: Processes) -> None:
    summary, held = processes.summary(), [processes.held(name) for name in ("l0", "l1")]
    assert summary["status"] == "finished"
    assert summary["tokens_seen"] == sum(h["steps"] for h in held) * TOKENS * NUM_FRAGMENTS
    assert summary["tokens_merged"] == summary["tokens_seen"]
    assert_exact(summary)
    assert_recorded_exactly(processes.run_dir)


def is_accepted(processes: Processes) -> bool:
    """Return whether the syncer accepts the token in the join file."""
    with suppress(AuthError):
        return bool(processes.status())
    return False


def test_killed_shards_a_killed_syncer_and_another_number_of_shards_lose_nothing(processes: Processes) -> None:
    syncer = processes.syncer(expect=2, num_shards=3, record_contributions=True)
    learners = [processes.learner(name, DILOCO_RUN_DIR=str(processes.run_dir)) for name in ("l0", "l1")]
    until(lambda: processes.status()["num_commits"] >= 8, "commits", processes)
    first = shards(syncer.pid)
    assert sorted(first) == ["1/3", "2/3"]
    for each in ("1/3", "2/3"):
        os.kill(first[each].pid, signal.SIGKILL)
        until(
            lambda: not all(shard["away_s"] is None for shard in processes.status()["shards"]), "the death", processes
        )
        until(lambda: all(shard["away_s"] is None for shard in processes.status()["shards"]), "the return", processes)
        processes.until_commits(8)
    again = shards(syncer.pid)
    assert {child.pid for child in again.values()}.isdisjoint(child.pid for child in first.values())

    os.kill(syncer.pid, signal.SIGKILL)
    processes.end(syncer)
    until(lambda: not any(child.is_running() for child in again.values()), "the end of its shards", processes)
    syncer = processes.syncer(expect=2, record_contributions=True)  # it knows how many shards the run has
    processes.until_commits(8)
    rotate(processes.run_dir)
    until(lambda: is_accepted(processes), "the new token to be accepted", processes)
    processes.until_commits(8)
    assert all(shard["bytes_up"] > 0 and shard["bytes_down"] > 0 for shard in processes.status()["shards"])

    syncer.terminate()
    processes.end(syncer)
    syncer = processes.syncer(expect=2, num_shards=2, record_contributions=True)
    processes.until_commits(8)
    assert sorted(shards(syncer.pid)) == ["1/2"]
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, syncer)] == [0, 0, 0]

    assert_nothing_lost(processes)
    told = ("shard away", "shard back", "restarted")
    tape = [line for line in read_tape(processes.run_dir / "tape" / "events.jsonl") if line["event"] in told]
    deaths = [("shard away", 1), ("shard back", 1), ("shard away", 2), ("shard back", 2)]
    assert [(line["event"], line["shard"]) for line in tape[:4]] == deaths
    killed, *_, stopped = tape[4:]  # in between, shards attach again with the new token
    assert (killed["event"], killed["num_records"] > 0) == ("restarted", True)
    assert (stopped["event"], stopped["num_records"]) == ("restarted", 0)
    found = replay(processes.run_dir)
    assert found.level == "merges"
    assert found.num_merges == sum(found.versions) >= 40
    held = [processes.held(name) for name in ("l0", "l1")]
    shutil.copytree(processes.run_dir, copy := processes.root / "copy")
    state, store = read_run(copy)
    assert store is not None
    last = next(h for h in held if h["is_last"])
    assert (last["landed"], tuple(last["digests"])) == ([f.version for f in state.rounds.fragments], store.digests())


def test_shards_on_other_machines_find_their_syncer_may_move_and_end_with_the_run(processes: Processes) -> None:
    def start(k: int) -> subprocess.Popen[bytes]:
        command = ("-m", "lightning_diloco.cli.main", "syncer", "--shard", f"{k}/3", "--of", invitation)
        return processes.start(f"shard{k}", *command, "--run-dir", processes.root / f"shard{k}")

    invitation = processes.run_dir / "standby"
    syncer = processes.syncer(expect=2, num_shards=3, shards_elsewhere=True)
    assert shards(syncer.pid) == {}
    running = [start(k) for k in (1, 2)]
    learners = [processes.learner(name) for name in ("l0", "l1")]
    until(lambda: processes.status()["num_commits"] >= 8, "commits", processes)
    os.kill(running[0].pid, signal.SIGKILL)
    processes.end(running[0])
    (processes.root / "shard1").rename(processes.root / "moved")
    (processes.root / "moved" / "syncer" / "shards" / "1" / "join").unlink()  # it will listen at another address
    (processes.root / "moved").rename(processes.root / "shard1")
    running[0] = start(1)
    until(lambda: all(shard["away_s"] is None for shard in processes.status()["shards"]), "the return", processes)
    processes.until_commits(8)
    os.kill(syncer.pid, signal.SIGKILL)
    processes.end(syncer)
    syncer = processes.syncer(expect=2, shards_elsewhere=True)
    until(lambda: processes.status()["num_commits"] >= 24, "commits", processes)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, syncer, *running)] == [0] * 5
    assert_nothing_lost(processes)
