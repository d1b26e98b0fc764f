"""A run ends at the right time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.roster import Member
from lightning_diloco.storage.local_runs import is_over
from lightning_diloco.syncer import run_end
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.run_end import BACK_S, EVALUATE_WAIT_S, LISTENING_S, RunEnd
from lightning_diloco.syncer.status.publisher import StatusPublisher

LEASE_S = SyncerState(run="r").config.lease_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(run_end.time, "monotonic", lambda: now[0])
    return now


def left(name: str, *, reason: str = "finished") -> Member:
    return Member(name, name, 1, 0, state="left", ending=reason, ended_s=1000.0)


def run_of(*members: Member) -> SyncerState:
    state = SyncerState(run="r")
    state.roster.members = {member.session: member for member in members}
    state._now_s = 1000.0
    return state


def test_expected_fleet_ends_the_run_when_all_have_finished(clock: list[float]) -> None:
    watch = RunEnd(expect=2, embedded_by=None)
    assert not watch.has_come(run_of(left("a")), clock[0])
    assert not watch.has_come(run_of(left("a"), left("b", reason="failed")), clock[0])
    assert not watch.has_come(run_of(left("a"), left("b"), Member("c", "c", 1, 2, state="active")), clock[0])
    assert watch.has_come(run_of(left("a"), left("b")), clock[0] + BACK_S)


def test_learners_that_finished_before_a_stop_do_not_end_a_reopened_run(clock: list[float]) -> None:
    clock[0] = 1001.0
    watch, state = RunEnd(expect=1, embedded_by=None), run_of(left("a"))
    watch.reopened()
    assert not watch.has_come(state, clock[0] + EVALUATE_WAIT_S)
    state.roster.members["a"].ended_s = clock[0] + 1.0
    assert not watch.has_come(state, clock[0] + 1.0)
    assert watch.has_come(state, clock[0] + 1.0 + BACK_S)


def test_the_syncer_waits_for_the_last_learner_while_it_polls_without_a_report(clock: list[float]) -> None:
    watch, state = RunEnd(expect=1, embedded_by=None), run_of(left("a"))
    watch.polled("a")
    assert not watch.has_come(state, clock[0])
    state.has_verdict = True
    assert watch.has_come(state, clock[0])
    state.has_verdict = False
    assert watch.has_come(state, clock[0] + LISTENING_S)


def test_a_restarted_syncer_waits_for_the_last_learner(clock: list[float]) -> None:
    watch, state = RunEnd(expect=1, embedded_by=None), run_of(left("a"))
    assert not watch.has_come(state, clock[0] + BACK_S - 0.1), "it has had no time to come back"
    clock[0] += 1.0
    watch.polled("a")
    assert not watch.has_come(state, clock[0] + LISTENING_S - 0.1)
    assert watch.has_come(state, clock[0] + LISTENING_S)


def test_the_wait_for_the_last_learner_is_limited(clock: list[float]) -> None:
    watch, state = RunEnd(expect=1, embedded_by=None), run_of(left("a"))
    watch.polled("a")
    assert not watch.has_come(state, clock[0])
    clock[0] += EVALUATE_WAIT_S + 1
    watch.polled("a")
    assert watch.has_come(state, clock[0])


def test_the_wait_is_longer_if_validations_take_long(clock: list[float]) -> None:
    watch = RunEnd(expect=1, embedded_by=None)
    validates = Member("a", "a", 1, 0, state="active", phase="evaluating")
    for now_s in (1000.0, 1000.0 + EVALUATE_WAIT_S):
        assert not watch.has_come(run_of(validates), now_s)
    clock[0] += EVALUATE_WAIT_S
    watch.polled("a")
    board = StatusPublisher(run_of(left("a")), Payloads(), ending=watch)
    for _ in range(2):
        assert board.status()["waits"][-1]["until_s"] == 3 * EVALUATE_WAIT_S
        assert not watch.has_come(run_of(left("a")), clock[0])
    for waits, has_come in ((2.9, False), (3.1, True)):
        clock[0] = 1000.0 + EVALUATE_WAIT_S * (1 + waits)
        watch.polled("a")
        assert watch.has_come(run_of(left("a")), clock[0]) == has_come


def test_embedded_syncer_outlives_its_starter_while_others_take_part(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = RunEnd(expect=None, embedded_by=os.getppid())
    monkeypatch.setattr(os, "getppid", lambda: 1)
    clock[0] += 10 * LEASE_S
    assert not watch.has_come(run_of(left("a"), Member("b", "b", 1, 1, state="active")), clock[0])
    assert watch.has_come(run_of(left("a"), left("b")), clock[0])


def test_embedded_syncer_waits_for_a_starter_that_is_suspended(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = RunEnd(expect=None, embedded_by=os.getppid())
    lapsed = run_of(Member("a", "a", 1, 0, state="active", is_lapsed=True))
    assert lapsed.is_finished
    assert not watch.has_come(lapsed, clock[0] + 1e6)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert watch.has_come(lapsed, clock[0]), "it was killed"


def test_embedded_syncer_whose_starter_died_before_it_joined_ends_after_a_lease(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = RunEnd(expect=None, embedded_by=os.getppid())
    assert not watch.has_come(run_of(), clock[0] + 10 * LEASE_S), "it may take its time"
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not watch.has_come(run_of(), clock[0] + 0.5 * LEASE_S)
    assert watch.has_come(run_of(), clock[0] + 1.5 * LEASE_S)
    watch.contacted()


def test_a_run_is_over_if_it_has_a_summary_and_was_not_served_afterwards(tmp_path: Path) -> None:
    join, summary = tmp_path / "join", tmp_path / "summary.json"
    assert not is_over(tmp_path, "r")
    for path, t_s in ((join, 10), (summary, 20)):
        path.write_text(json.dumps({"run": "r", "status": "finished"}))
        os.utime(path, (t_s, t_s))
    assert is_over(tmp_path, "r")
    assert not is_over(tmp_path, "another")
    os.utime(join, (30, 30))
    assert not is_over(tmp_path, "r"), "it is served again"
    summary.write_text(json.dumps({"run": "r", "status": "interrupted"}))
    assert not is_over(tmp_path, "r"), "it can be taken up again"


def test_a_syncer_that_expects_no_learners_continues_to_serve(clock: list[float]) -> None:
    assert not RunEnd(expect=None, embedded_by=None).has_come(run_of(left("a")), clock[0] + 1e6)
