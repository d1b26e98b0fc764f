"""Status and summary of a run."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_diloco.protocol.syncer.ledger import Ledger
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.roster import Member
from lightning_diloco.syncer.status import report

FIGURES = {"now_s": 10.0, "bytes_up": 3, "bytes_down": 5}


def run_of(*members: Member) -> SyncerState:
    state = SyncerState(run="r")
    state.ledger = Ledger(1)
    state.roster.members = {member.session: member for member in members}
    return state


def rows(state: SyncerState) -> list[tuple[str, int, str]]:
    status = report.status(state, disk=None, uptime_s=10.0, **FIGURES)
    return [(row["id"], row["incarnation"], row["phase"]) for row in status["learners"]]


def test_a_joining_successor_is_shown_next_to_the_process_that_it_will_replace() -> None:
    old, new = Member("a", "l0", 1, 0, state="active", is_lapsed=True), Member("b", "l0", 2, 0, state="joining")
    state = run_of(new, old, Member("c", "l1", 1, 1, state="active"))
    assert rows(state) == [("l0", 1, "lapsed"), ("l0", 2, "joining"), ("l1", 1, "stepping")]
    old.state, new.state = "fenced", "active"
    assert rows(state) == [("l0", 2, "stepping"), ("l1", 1, "stepping")]


def test_a_failing_disk_is_the_first_wait() -> None:
    status = report.status(run_of(), disk=("no space left", 4.0), uptime_s=1.0, **FIGURES)
    assert (status["state"], status["reason"]) == ("suspended", "no space left")


def test_a_run_is_not_finished_while_lapsed_learners_may_return() -> None:
    lapsed = Member("a", "l0", 1, 0, state="active", is_lapsed=True)
    state = run_of(lapsed)
    state.manifest = {}
    assert report.status(state, disk=None, uptime_s=1.0, **FIGURES)["state"] == "open"
    lapsed.state, lapsed.ending, lapsed.ended_s = "left", "finished", 9.5
    assert report.status(state, disk=None, uptime_s=1.0, **FIGURES)["state"] == "finished"


def stage(uptime_s: float, *members: Member) -> str:
    state = run_of(*members)
    state.manifest = {}
    return str(report.status(state, disk=None, uptime_s=uptime_s, **FIGURES)["state"])


def test_a_run_is_not_finished_after_an_interruption_a_rerun_or_a_cut_link() -> None:
    done = Member("a", "l0", 1, 0, state="left", ending="finished", active_s=0.0, ended_s=5.0)
    stopped = Member("b", "l1", 1, 1, state="left", ending="preempted", active_s=0.0, ended_s=6.0)
    cut_off = Member("c", "l0", 2, 0, state="active", is_lapsed=True, active_s=7.0)
    killed = Member("d", "l1", 1, 1, state="active", is_lapsed=True, active_s=0.0)
    assert stage(10.0, done) == stage(10.0, done, killed) == "finished"
    assert stage(10.0, done, stopped) == "idle"
    assert stage(3.0, done) == "idle"
    assert stage(10.0, done, cut_off) == stage(3.0, done, cut_off) == "open"


def test_learners_that_are_gone_do_not_stay_in_the_status() -> None:
    def is_shown(uptime_s: float, now_s: float, **member: Any) -> bool:
        state = run_of(Member("a", "l0", 1, 0, **member))
        status = report.status(state, disk=None, uptime_s=uptime_s, **{**FIGURES, "now_s": now_s})
        return bool(status["learners"])

    lease_s = SyncerState(run="r").config.lease_s
    assert is_shown(1e4, 1e4, state="joining", heard_s=1e4 - 1.0)
    assert not is_shown(1e4, 1e4, state="joining", heard_s=1e4 - 1.0 - lease_s)  # was rejected
    assert is_shown(1e4, 1e4, state="left", ended_s=1e4 - 9.0)
    assert not is_shown(8.0, 1e4, state="left", ended_s=1e4 - 9.0)  # before this syncer started
    assert not is_shown(1e4, 1e4, state="left", ended_s=1e4 - 1.0 - report.GONE_S)
    assert is_shown(1e4, 1e4, state="active", is_lapsed=True, heard_s=1e4 - 99.0)
    assert not is_shown(1e4, 1e4, state="active", is_lapsed=True, heard_s=1e4 - 1.0 - report.GONE_S)


def test_the_shown_step_is_that_of_the_trainer() -> None:
    again = Member("a", "l0", 2, 0, state="active", step=3, metrics={report.TRAINER_STEP: 103.0})
    status = report.status(run_of(again), disk=None, uptime_s=1.0, **FIGURES)
    assert [(row["step"], row["trainer_step"]) for row in status["learners"]] == [(3, 103)]


def trained(first: Member, its_tokens: int, second: Member, other_tokens: int) -> SyncerState:
    """Return a run of two processes of one learner; all of their tokens are merged."""
    state = run_of(first, second)
    for member, tokens in ((first, its_tokens), (second, other_tokens)):
        account = state.ledger.account("l0", member.incarnation)
        account.merge(0, member.incarnation, 0, tokens)
        account.seen = tokens
    return state


def test_goodput_is_reported_with_and_without_the_time_of_a_stop() -> None:
    first = Member("a", "l0", 1, 0, state="left", active_s=0.0, ended_s=4.0, tokens_per_s=10.0)
    second = Member("b", "l0", 2, 0, state="left", active_s=8.0, ended_s=10.0, tokens_per_s=10.0)
    state = trained(first, 30, second, 15)
    told = report.summary(state, status="finished", wall_s=10.0, pauses=[(4.5, 7.5), (11.0, 12.0)], **FIGURES)
    assert told["goodput"] == pytest.approx(45 / 100)
    assert told["goodput_unpaused"] == pytest.approx(45 / 70)
    assert told["paused_s"] == pytest.approx(4.0)


def test_goodput_counts_downtime_and_weights_incarnations_by_their_tokens() -> None:
    first = Member("a", "l0", 1, 0, state="fenced", active_s=0.0, ended_s=6.0, tokens_per_s=5.0)
    second = Member("b", "l0", 2, 0, state="left", active_s=6.0, ended_s=8.0, tokens_per_s=10.0)
    state = trained(first, 20, second, 10)
    undisturbed = (20 + 10) / (20 / 5.0 + 10 / 10.0)
    assert report.goodput(state, 10.0) == pytest.approx(30 / (8.0 * undisturbed))


def test_goodput_is_unknown_before_any_measurement() -> None:
    assert report.goodput(run_of(Member("a", "l0", 1, 0, state="active", active_s=0.0)), 10.0) is None
