"""Syncer and learners as processes, over Flight with TLS: they finish, and survive kills of some of them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lightning_diloco.errors import AuthError
from lightning_diloco.process.threads import NICENESS
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer.shards.whole import read_run
from lightning_diloco.transport.flight import FlightConnection
from tests.e2e.conftest import Processes, until
from tests.e2e.learner import TOKENS
from tests.e2e.recorded import assert_damage_is_told, assert_recorded_exactly, assert_tampering_is_seen

pytestmark = pytest.mark.slow

NUM_FRAGMENTS = 4


def assert_exact(summary: dict) -> None:
    discarded = sum(summary["tokens_discarded"].values())
    assert summary["tokens_seen"] == summary["tokens_merged"] + discarded
    assert summary["tokens_pending"] == 0
    assert summary["ledger_exact"]


def restored(run_dir: Path, to: Path) -> tuple[list[int], tuple[str, ...]]:
    """Return the versions and digests of a copy of the files on disk."""
    shutil.copytree(run_dir, to)
    state, store = read_run(to)
    assert store is not None
    return [f.version for f in state.rounds.fragments], store.digests()


def test_two_learners_finish_over_tls_and_strangers_are_refused(processes: Processes) -> None:
    syncer = processes.syncer(expect=2)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    until(lambda: processes.status()["num_commits"] >= 8, "commits", processes)
    address = processes.address
    assert address.fingerprint is not None
    for wrong in (replace(address, token="not-the-token"), replace(address, fingerprint="0" * 64)):
        connection = FlightConnection(wrong)
        with pytest.raises(AuthError, match="join string"):
            connection.status()
        connection.close()
    shown = subprocess.run(
        [sys.executable, "-m", "lightning_diloco.cli.main", "status", str(processes.run_dir), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {m["id"] for m in json.loads(shown.stdout)["learners"]} == {"l0", "l1"}
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, syncer)] == [0, 0, 0]
    summary, held = processes.summary(), [processes.held(name) for name in ("l0", "l1")]
    assert summary["status"] == "finished"
    assert summary["eval_loss"] == 0.5
    assert summary["tokens_merged"] == summary["tokens_seen"] == sum(h["steps"] for h in held) * TOKENS * NUM_FRAGMENTS
    assert_exact(summary)
    versions, digests = restored(processes.run_dir, processes.root / "copy")
    last = next(h for h in held if h["is_last"])
    assert (last["landed"], tuple(last["digests"])) == (versions, digests)
    for h in held:
        assert all(h["digests"][p] == digests[p] for p in range(NUM_FRAGMENTS) if h["landed"][p] == versions[p])


@pytest.mark.chaos
def test_killed_learners_lapse_or_return_and_the_others_continue(
    processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = processes.syncer()
    learners = {name: processes.learner(name) for name in ("dies", "returns", "stays")}
    until(lambda: len(processes.status()["learners"]) == 3, "three learners", processes)
    processes.until_commits(8)
    for name in ("dies", "returns"):
        os.kill(learners[name].pid, signal.SIGKILL)
    processes.until_commits(4)
    back = processes.learner("returns")

    def phases() -> dict[str, str]:
        return {m["id"]: m["phase"] for m in processes.status()["learners"]}

    until(lambda: phases() == {"dies": "lapsed", "returns": "stepping", "stays": "stepping"}, "the return", processes)
    processes.until_commits(8)
    processes.stop_file.touch()
    assert [processes.end(learners["stays"]), processes.end(back)] == [0, 0]
    until(lambda: processes.status()["state"] == "finished", "the end of the run", processes)
    syncer.terminate()
    assert processes.end(syncer) == 0
    summary = processes.summary()
    assert summary["joins"] == 4
    assert summary["lapses"] in (1, 2), "the one that returns may take longer than a lease to start"
    assert summary["tokens_discarded"]["lapsed"] > 0
    assert_exact(summary)
    assert_recorded_exactly(processes.run_dir)
    assert_tampering_is_seen(processes.run_dir, processes.root / "tampered")
    assert_damage_is_told(processes.run_dir, processes.root / "damaged", capsys)


@pytest.mark.chaos
def test_killed_syncer_is_restored_bit_for_bit_and_its_learners_reconnect(processes: Processes) -> None:
    syncer = processes.syncer(expect=2)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    until(lambda: processes.status()["num_commits"] >= 8, "commits", processes)
    told = processes.status()["versions"]
    os.kill(syncer.pid, signal.SIGKILL)
    processes.end(syncer)
    versions, digests = restored(processes.run_dir, processes.root / "first")
    assert all(new >= old for new, old in zip(versions, told, strict=True)), "what was told is durable"
    assert restored(processes.run_dir, processes.root / "second") == (versions, digests)
    syncer = processes.syncer(expect=2)
    began_s, commits = time.monotonic(), processes.status()["num_commits"]
    until(lambda: processes.status()["num_commits"] > commits, "rounds that go on", processes)
    assert time.monotonic() - began_s < 5.0
    processes.until_commits(8)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, syncer)] == [0, 0, 0]
    summary, held = processes.summary(), [processes.held(name) for name in ("l0", "l1")]
    assert summary["status"] == "finished"
    assert summary["tokens_seen"] == sum(h["steps"] for h in held) * TOKENS * NUM_FRAGMENTS
    assert summary["tokens_merged"] == summary["tokens_seen"]
    assert_exact(summary)
    assert_recorded_exactly(processes.run_dir)
    events = [line["event"] for line in read_tape(processes.run_dir / "tape" / "events.jsonl")]
    assert "regenerated" not in events, "learners hold exactly what the restarted syncer has"
    assert events.count("join") == 2


@pytest.mark.chaos
@pytest.mark.parametrize("is_back", [True, False], ids=["heard when it is back", "spoken while it is away"])
def test_syncer_killed_during_the_last_evaluation_receives_the_loss(processes: Processes, is_back: bool) -> None:
    verdict = processes.root / "verdict"
    syncer, learner = processes.syncer(expect=1), processes.learner("l0", verdict=verdict)
    until(lambda: processes.status()["num_commits"] >= 4, "commits", processes)
    processes.stop_file.touch()
    until(lambda: processes.status()["state"] == "finished", "the leave", processes)
    os.kill(syncer.pid, signal.SIGKILL)
    processes.end(syncer)
    if not is_back:
        verdict.touch()
    syncer = processes.syncer(expect=1)
    if is_back:
        until(lambda: "the syncer is back" in (processes.root / "l0.log").read_text(), "the syncer", processes)
        verdict.touch()
    assert [processes.end(process) for process in (learner, syncer)] == [0, 0]
    assert processes.summary()["eval_loss"] == 0.5


def test_full_disk_suspends_commits_until_there_is_space(processes: Processes) -> None:
    syncer = processes.syncer(expect=2)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    until(lambda: processes.status()["num_commits"] >= 4, "commits", processes)
    before = resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE, (1024, before[1]))  # no file may grow
    status = until(lambda: (s := processes.status())["state"] == "suspended" and s, "being told", processes)
    assert "could not append" in status["reason"]
    steps = sum(m["step"] for m in status["learners"])
    until(lambda: sum(m["step"] for m in processes.status()["learners"]) > steps + 50, "learners go on", processes)
    assert processes.status()["num_commits"] == status["num_commits"]
    resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE, before)
    processes.until_commits(4)
    assert processes.status()["reason"] is None
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, syncer)] == [0, 0, 0]
    assert processes.summary()["tokens_merged"] == processes.summary()["tokens_seen"]
    assert_exact(processes.summary())


def test_interrupted_learner_leaves_within_seconds(processes: Processes) -> None:
    processes.syncer()
    interrupted, other = processes.learner("l0"), processes.learner("l1")
    stepping = {"l0": "stepping", "l1": "stepping"}
    until(lambda: {m["id"]: m["phase"] for m in processes.status()["learners"]} == stepping, "two learners", processes)
    processes.until_commits(4)
    interrupted.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    assert processes.end(interrupted) != 0
    assert time.monotonic() - began_s < 5.0
    phases = {m["id"]: m["phase"] for m in processes.status()["learners"]}
    assert phases["l0"] == "left", "it said goodbye"
    processes.until_commits(4)
    processes.stop_file.touch()
    assert processes.end(other) == 0


def embedded_syncers(learner: subprocess.Popen[bytes]) -> list[psutil.Process]:
    wanted = ["--embedded-by", str(learner.pid)]
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == wanted]


def test_embedded_syncer_writes_the_summary_and_ends_with_its_learner(processes: Processes) -> None:
    learner = processes.alone()
    (syncer,) = until(lambda: embedded_syncers(learner), "an embedded syncer", processes)
    tape = until(lambda: [*processes.root.glob("diloco/*/tape/events.jsonl")], "its tape", processes)[0]
    until(lambda: any(line["event"] == "commit" for line in read_tape(tape)), "commits", processes)
    assert {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in syncer.threads()} == {max(NICENESS, os.nice(0))}
    processes.stop_file.touch()
    assert processes.end(learner) == 0
    assert not syncer.is_running(), "who started it waits for its summary"
    summary = json.loads((tape.parents[1] / "summary.json").read_text())
    assert (summary["status"], summary["eval_loss"]) == ("finished", 0.5)
    assert_exact(summary)


@pytest.mark.chaos
def test_a_suspended_learner_continues_with_the_syncer_that_it_started(processes: Processes) -> None:
    learner = processes.alone()
    (syncer,) = until(lambda: embedded_syncers(learner), "an embedded syncer", processes)
    tape = until(lambda: [*processes.root.glob("diloco/*/tape/events.jsonl")], "its tape", processes)[0]

    def seen(event: str) -> int:
        return sum(line["event"] == event for line in read_tape(tape))

    until(lambda: seen("commit"), "commits", processes)
    learner.send_signal(signal.SIGSTOP)
    until(lambda: seen("lapse"), "its lapse", processes)
    num_commits = seen("commit")
    learner.send_signal(signal.SIGCONT)
    until(lambda: seen("commit") > num_commits + 1, "commits after it", processes)
    assert syncer.is_running()
    processes.stop_file.touch()
    assert processes.end(learner) == 0
    summary = json.loads((tape.parents[1] / "summary.json").read_text())
    assert (summary["status"], summary["lapses"]) == ("finished", 1)
    assert_exact(summary)


@pytest.mark.chaos
def test_embedded_syncer_of_a_killed_learner_ends_after_a_lease(processes: Processes) -> None:
    learner = processes.alone()
    (syncer,) = until(lambda: embedded_syncers(learner), "an embedded syncer", processes)
    tape = until(lambda: [*processes.root.glob("diloco/*/tape/events.jsonl")], "its tape", processes)[0]
    until(lambda: any(line["event"] == "join" for line in read_tape(tape)), "the join", processes)
    learner.kill()
    processes.end(learner)
    until(lambda: not syncer.is_running(), "its end", processes)
    summary = json.loads((tape.parents[1] / "summary.json").read_text())
    assert summary["lapses"] == 1
    assert_exact(summary)


def test_a_learner_that_cannot_join_ends_its_embedded_syncer(processes: Processes) -> None:
    learner = processes.alone(num_fragments=99)
    assert processes.end(learner) == 3
    assert "num_fragments=99: must be at most sync_every=12" in processes.logs()
    assert embedded_syncers(learner) == []


@pytest.mark.chaos
def test_embedded_syncer_of_a_learner_killed_before_it_joined_ends_after_a_lease(processes: Processes) -> None:
    learner = processes.alone()
    (syncer,) = until(lambda: embedded_syncers(learner), "an embedded syncer", processes)
    learner.kill()  # the syncer is still importing
    processes.end(learner)
    until(lambda: not syncer.is_running(), "its end", processes)
