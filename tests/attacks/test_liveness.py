"""A blocked syncer does not make learners lapse."""

from __future__ import annotations

import types
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lightning_diloco.errors import TransportError
from lightning_diloco.protocol import events, messages
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer import inbox, service
from lightning_diloco.syncer.store import SyncerStore
from tests.attacks.liveness import StuckDisk, freeze
from tests.e2e.conftest import Processes
from tests.e2e.conftest import until as eventually
from tests.e2e.test_processes import embedded_syncers
from tests.fuzz.target import Target
from tests.learner.fleet import until
from tests.protocol.harness import Syncer

LEASE_S = SyncerState(run="any").config.lease_s


class Clock:
    """Replaces the time module of the inbox."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1e6
        monkeypatch.setattr(inbox, "time", types.SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(inbox, "STOOD_STILL_S", float("inf"))  # this clock jumps, and nothing stands still


@pytest.mark.parametrize("may_wait", [service.MAX_WAITING, 3], ids=["heartbeats wait", "heartbeats are refused"])
def test_a_disk_that_blocks_for_longer_than_a_lease_lapses_no_learner_that_sends_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_wait: int
) -> None:
    disk, clock = StuckDisk(), Clock(monkeypatch)
    target = Target(tmp_path, durable=SyncerStore(tmp_path, faults=disk))
    monkeypatch.setattr(service, "MAX_WAITING", may_wait)
    honest, state = target.honest, target.service.state
    heartbeat = messages.Heartbeat("stepping", honest.progress(), 0.01, 1e3)
    honest.say(heartbeat)
    target.settle()
    disk.get_stuck()
    target.mallory.say(messages.Heartbeat("stepping", honest.progress(), 0.01, 1e3, stop="the loop writes this down"))
    assert disk.is_waited_for.wait(10.0)
    for _ in range(9):
        clock.now_s += state.config.lease_s / 3
        with suppress(TransportError):
            honest.say(heartbeat)
    disk.work()
    until(lambda: state.num_lapses, "the lapse of mallory, who was silent")
    target.settle()
    assert {m.learner for m in state.roster.live()} == {"honest"}
    (lapse,) = (line for line in read_tape(tmp_path / "tape" / "events.jsonl") if line["event"] == "lapse")
    assert lapse["learner"] == "mallory"
    target.stop()


def test_a_suspended_syncer_renews_all_leases() -> None:
    syncer = Syncer("a", "b")
    syncer.now_s += 10 * LEASE_S
    syncer.handle(events.StoodStill(10 * LEASE_S))
    syncer.tick()
    assert len(syncer.state.roster.live()) == 2
    syncer.tick(0.9 * LEASE_S)
    syncer.beat("a")
    syncer.tick(0.2 * LEASE_S)
    assert [m.learner for m in syncer.state.roster.live()] == ["a"]


def told(tape: Path, event: str) -> list[dict]:
    return [line for line in read_tape(tape) if line["event"] == event]


@pytest.mark.slow
@pytest.mark.chaos
def test_no_learner_lapses_at_a_frozen_syncer(processes: Processes) -> None:
    syncer = processes.syncer(lease_s=2.0)
    for name in ("l0", "l1"):
        processes.learner(name, deadline_s=1.0)
    eventually(lambda: len(processes.status()["learners"]) == 2, "two learners", processes)
    processes.until_commits(4)
    freeze(syncer.pid, 4.0)
    processes.until_commits(8)
    tape = processes.run_dir / "tape" / "events.jsonl"
    assert [line["for_s"] > 3.0 for line in told(tape, "stood still")] == [True]
    assert told(tape, "lapse") == []


@pytest.mark.slow
@pytest.mark.chaos
def test_a_frozen_embedded_syncer_keeps_the_learners_that_joined_its_starter(processes: Processes) -> None:
    starter = processes.alone()
    tape = eventually(lambda: [*processes.root.glob("diloco/*/tape/events.jsonl")], "its tape", processes)[0]
    eventually(lambda: told(tape, "commit"), "commits", processes)
    (syncer,) = embedded_syncers(starter)
    try:
        processes.run_dir = tape.parents[1]
        joined_until = processes.root / "joined may stop"
        stop_file, processes.stop_file = processes.stop_file, joined_until
        processes.learner("joined")
        eventually(lambda: len(told(tape, "join")) == 2, "the other", processes)
        stop_file.touch()
        assert processes.end(starter) == 0
        eventually(lambda: told(tape, "leave"), "the leave of the starter", processes)
        num_commits = len(told(tape, "commit"))
        freeze(syncer.pid, 4.0)
        eventually(lambda: len(told(tape, "commit")) > num_commits + 4, "commits after it", processes)
        assert told(tape, "lapse") == []
        joined_until.touch()
        eventually(lambda: not syncer.is_running(), "the end of the run", processes)
        assert processes.summary()["status"] == "finished"
    finally:
        with suppress(psutil.NoSuchProcess):
            syncer.kill()
