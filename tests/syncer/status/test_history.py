"""A restarted syncer reads the start times of its learners from the tape, and so knows the run's goodput."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.roster import Member, Roster
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer.status import report
from lightning_diloco.syncer.status.history import History, Recollection
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.base import Json
from tests.learner.fleet import Fleet, until


def recall(roster: Roster, lines: list[Json]) -> History:
    recollection = Recollection()
    for line in lines:
        recollection.add(line)
    return recollection.recall(roster, now_s=30.0, unix_s=110.0)


def rates(**tokens_per_s: float) -> list[Json]:
    return [{"id": name, "tokens_per_s": rate} for name, rate in tokens_per_s.items()]


def progress(t: float, up: int, **tokens_per_s: float) -> Json:
    return {"t": t, "event": "progress", "learners": rates(**tokens_per_s), "bytes_up": up, "bytes_down": 2 * up}


TAPE: list[Json] = [
    {"t": 100.0, "event": "join", "learner": "l0", "incarnation": 1},
    {"t": 101.0, "event": "join", "learner": "l1", "incarnation": 1},
    progress(104.0, 10, l0=7.0, l1=0.0),
    {"t": 105.0, "event": "join", "learner": "l0", "incarnation": 2},
    progress(106.0, 15, l0=9.0, l1=3.0),
    {"t": 107.0, "event": "leave", "learner": "l1"},
    {"t": 108.0, "event": "commit", "learners": ["l0"]},
]


def test_times_and_rates_are_restored_on_the_clock_of_this_process() -> None:
    roster = Roster()
    roster.members = {
        "a": Member("a", "l0", 1, 0, state="fenced"),
        "b": Member("b", "l0", 2, 0, state="active"),
        "c": Member("c", "l1", 1, 1, state="left"),
        "d": Member("d", "l2", 1, 2, state="active"),
    }
    past = recall(roster, TAPE)
    found = {key: (m.active_s, m.ended_s, m.tokens_per_s) for key, m in roster.members.items()}
    assert found == {
        "a": (20.0, 25.0, 7.0),
        "b": (25.0, None, 9.0),
        "c": (21.0, 27.0, 3.0),
        "d": (None, None, 0.0),
    }
    assert past == History(began_s=20.0, bytes_up=15, bytes_down=30)


def test_a_run_pauses_from_a_stop_to_the_next_line_and_not_after_a_kill() -> None:
    stop: Json = {"t": 108.5, "event": "closed"}
    assert recall(Roster(), TAPE).pauses == []
    assert recall(Roster(), [*TAPE, stop]).pauses == [(28.5, 30.0)]
    again: Json = {"t": 109.0, "event": "join", "learner": "l0", "incarnation": 3}
    past = recall(Roster(), [*TAPE, stop, again])
    assert past.pauses == [(28.5, 29.0)]
    assert not past.was_closed
    assert recall(Roster(), [*TAPE, stop]).was_closed


@pytest.mark.seconds
def test_goodput_spans_a_restart_of_the_syncer(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("a").go()
        fleet.until_commits(6)
        began_s = next(m.active_s for m in fleet.service.state.roster.members.values())
        fleet.restart()
        (member,) = fleet.service.state.roster.members.values()
        assert member.active_s == pytest.approx(began_s, abs=0.1)
        fleet.until_commits(6)
        learner.enough().done()
        assert 0.0 < fleet.stop()["goodput"] < 1.5


@pytest.mark.seconds
def test_joins_and_leaves_are_known_after_a_power_cut_that_lost_the_end_of_the_tape(tmp_path: Path) -> None:
    tape = tmp_path / "tape" / "events.jsonl"
    with Fleet(tmp_path) as fleet:
        stays, leaves = fleet.learner("stays").go(), fleet.learner("leaves").go()
        fleet.until_commits(6)
        leaves.enough().done()
        fleet.crash()
        lines = tape.read_bytes().splitlines(keepends=True)
        first_join = next(k for k, line in enumerate(lines) if b'"event":"join"' in line)
        tape.write_bytes(b"".join(lines[:first_join]))
        began_s = time.time()
        fleet.restart()
        told = [line for line in read_tape(tape) if line["event"] in ("join", "leave")]
        assert [(line["event"], line["learner"], line["restored"]) for line in told] == [
            ("join", told[0]["learner"], True),
            ("join", told[1]["learner"], True),
            ("leave", "leaves", True),
        ]
        assert {line["learner"] for line in told[:2]} == {"stays", "leaves"}
        assert all(line["t"] >= began_s for line in told)
        fleet.until_commits(6)
        stays.enough().done()
        assert fleet.stop()["goodput"] > 0.0
        fleet.restart()
        assert sum(line["event"] == "join" for line in read_tape(tape)) == 2, "what is there is not told again"


@pytest.mark.seconds
def test_a_restarted_standby_continues_to_copy_the_tape_and_has_the_same_history(tmp_path: Path) -> None:
    """It died between the record of a join and the line on the tape."""
    with Fleet(tmp_path / "primary") as fleet:
        learners = [fleet.learner(name).go() for name in ("first", "second")]
        fleet.until_commits(6)
        learners[0].enough().done()
        learners[1].enough().done()
        fleet.crash()
    text = (tmp_path / "primary" / "tape" / "events.jsonl").read_bytes()
    shutil.copytree(tmp_path / "primary", tmp_path / "standby")
    last_join = text.rindex(b"\n", 0, text.rindex(b'"event":"join"')) + 1
    (tmp_path / "standby" / "tape" / "events.jsonl").write_bytes(text[:last_join])

    state, durable = SyncerState(run=""), SyncerStore(tmp_path / "standby")
    store = durable.load(state, 0.0)
    assert store is not None
    assert durable.tape.nbytes == last_join, "lines of its own would part it from the primary's"
    durable.follow_tape(text[last_join:])
    assert (tmp_path / "standby" / "tape" / "events.jsonl").read_bytes() == text
    durable.take_over(SyncerState(run=""), state, store, 0.0)
    assert (tmp_path / "standby" / "tape" / "events.jsonl").read_bytes() == text
    durable.close()

    primary = SyncerStore(tmp_path / "primary")
    primary.restore(SyncerState(run=""), 0.0)
    assert durable.past.began_s == pytest.approx(primary.past.began_s, abs=1.0)
    assert durable.past.usual._recent[0].keys() == primary.past.usual._recent[0].keys() == {"first", "second"}
    primary.close()


@pytest.mark.seconds
def test_a_takeover_adds_lines_that_only_the_log_has_to_the_tape(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("a").go()
        fleet.until_commits(3)
        learner.enough().done()
        fleet.crash()
    tape = tmp_path / "tape" / "events.jsonl"
    text = tape.read_bytes()
    tape.write_bytes(text[: text.rindex(b"\n", 0, text.index(b'"event":"join"')) + 1])
    state, durable = SyncerState(run=""), SyncerStore(tmp_path)
    store = durable.load(state, 0.0)
    assert store is not None
    durable.take_over(SyncerState(run=""), state, store, 0.0)
    assert [line["event"] for line in read_tape(tape) if line.get("restored")] == ["join", "leave"]
    durable.close()


@pytest.mark.seconds
def test_bytes_and_wall_time_span_a_restart_of_the_syncer(tmp_path: Path) -> None:
    def notes() -> list[Json]:
        lines = read_tape(tmp_path / "tape" / "events.jsonl")
        return [line for line in lines if line["event"] == "progress" and line["bytes_up"] > 0]

    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("a").go()
        until(notes, "a note with bytes in it")
        fleet.restart()
        fleet.until_commits(3)
        learner.enough().done()
        noted, *_ = notes()
        passed_s, summary = time.time() - noted["t"], fleet.stop()
    assert summary["bytes_up"] > noted["bytes_up"]
    assert summary["bytes_down"] > noted["bytes_down"]
    assert summary["wall_s"] > passed_s


@pytest.mark.seconds
def test_goodput_is_unknown_if_the_tape_is_gone(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("a").go()
        fleet.until_commits(3)
        (tmp_path / "tape" / "events.jsonl").rename(tmp_path / "elsewhere")
        fleet.restart()
        assert report.goodput(fleet.service.state, 1.0) is None
        learner.enough().done()
