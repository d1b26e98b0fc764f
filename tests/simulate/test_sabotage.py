"""The invariants must be able to fail: each case breaks one rule of a machine, and a check must detect it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.events import Staged
from lightning_diloco.protocol.learner.fragment import Fragment
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.protocol.syncer import rounds
from lightning_diloco.protocol.syncer.contributions import Contributions
from lightning_diloco.protocol.syncer.durable_state import DurableState
from lightning_diloco.protocol.syncer.ledger import Account
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.roster import Roster
from lightning_diloco.protocol.syncer.rounds import Rounds
from lightning_diloco.simulate import Fleet, Network, Pace
from lightning_diloco.simulate.standby import Standby

Patch = pytest.MonkeyPatch


def history() -> Fleet:
    """Run with a norm guard, a slow upload, an early leave, and a learner that is cut off, replaced and returns."""
    config = RunConfig(sync_every=4, num_fragments=2, overlap=1, quorum=2, max_staleness_versions=1, lease_s=4.0)
    network = Network(latency_s=0.05, upload_s=0.4, download_s=0.4)
    fleet = Fleet(config, network=network, seed=3, guard=0.2)
    fleet.start("quick", Pace(step_s=0.5, jitter=0.1, tokens=7, num_steps=90))
    fleet.start("slow", Pace(step_s=1.5, jitter=0.1, tokens=5, num_steps=25, upload_factor=12.0))
    zombie = fleet.start("gone", Pace(step_s=1.0, jitter=0.1, tokens=3))
    fleet.run_until(12.0)
    fleet.cut(zombie)
    fleet.run_until(20.0)
    fleet.start("gone", Pace(step_s=1.0, jitter=0.1, tokens=4, num_steps=20))
    fleet.syncer.disk.take_snapshot(fleet.syncer.state)
    fleet.run_until(25.0)
    fleet.heal(zombie)
    fleet.start("brief", Pace(step_s=1.0, tokens=2, num_steps=9, drain_s=0.0))
    next(iter(fleet.learners.values())).bad_payload = True
    fleet.run_until(35.0)
    fleet.syncer.restart(use_snapshot=True)
    fleet.run_to_the_end(limit_s=300.0)
    fleet.run_for(10.0)
    fleet.invariants.audit()
    fleet.syncer.state.finish()
    assert fleet.syncer.state.ledger.totals().is_exact
    assert zombie.error is not None
    assert "was replaced by a newer process" in zombie.error
    return fleet


def test_the_unchanged_history_is_valid_and_has_every_kind_of_loss() -> None:
    fleet = history()

    assert {"lapsed", "undrained", "refused"} <= set(fleet.syncer.state.ledger.totals().discarded)
    assert "superseded" in {note.event for _, note in fleet.syncer.notes}


def commit_is_booked_twice(patch: Patch) -> None:
    apply_merge = Contributions.apply_merge

    def twice(self: Contributions, record: Any, merge: Any) -> None:
        apply_merge(self, record, merge)
        apply_merge(self, record, merge)

    patch.setattr(Contributions, "apply_merge", twice)


def merged_ranges_may_overlap(patch: Patch) -> None:
    """Make a learner send merged tokens again, and the syncer accept them."""
    take_back = Fragment.take_back
    patch.setattr(Fragment, "take_back", lambda self, kept=0.0: take_back(self))
    patch.setattr("lightning_diloco.protocol.intervals.IntervalSet.overlap", lambda *_: 0)


def undrained_tokens_are_forgotten(patch: Patch) -> None:
    def close(self: Account, cause: str) -> None:
        self.is_closed = True

    patch.setattr(Account, "close", close)


def old_processes_are_not_fenced(patch: Patch) -> None:
    patch.setattr("lightning_diloco.protocol.syncer.roster.Roster.older", lambda *_: [])


def promises_may_be_broken(patch: Patch) -> None:
    patch.setattr("lightning_diloco.protocol.learner.boundary_promises.Promises.postpone", lambda *_: False)


def a_quorum_of_one_is_enough(patch: Patch) -> None:
    patch.setattr(Rounds, "effective_quorum", lambda *_: 1)


def a_landed_merge_is_not_taken_off_the_parameters(patch: Patch) -> None:
    def fates_never_name_it(self: Fragment, update: Staged, generation: int) -> None:
        self.is_fetching, self.staged = False, update

    patch.setattr(Fragment, "stage", fates_never_name_it)
    patch.setattr("lightning_diloco.simulate.learner.Update.__init__", _without_sent)


def _without_sent(self: Any, full: int | None, increment: int, sent: int) -> None:
    for name, value in (("full", full), ("increment", increment), ("sent", 0)):
        object.__setattr__(self, name, value)


def a_superseded_range_is_dropped(patch: Patch) -> None:
    take_back = Fragment.take_back
    patch.setattr(
        Fragment,
        "take_back",
        lambda self, kept=0.0: take_back(self, kept) if kept else self.drop_outstanding() and None,
    )


def what_the_guard_cut_off_counts_as_merged(patch: Patch) -> None:
    patch.setattr("lightning_diloco.protocol.messages.Ready.stop_if", lambda self, kept: self.stop)


def a_refusal_is_not_booked(patch: Patch) -> None:
    book = LearnerState._book
    patch.setattr(LearnerState, "_book", lambda self, cause, n: book(self, cause, 0 if cause == "refused" else n))


def a_restart_forgets_the_fates(patch: Patch) -> None:
    patch.setattr("lightning_diloco.protocol.syncer.durable_state._member", _member_without_fates())


def _member_without_fates() -> Callable[..., Any]:
    from lightning_diloco.protocol.syncer import durable_state as durable

    real = durable._member

    def forgetful(saved: Any, now_s: float) -> Any:
        member = real(saved, now_s)
        member.fates.clear()
        return member

    return forgetful


def nothing_waits_for_the_standby(patch: Patch) -> None:
    patch.setattr(Standby, "wait", lambda self, num_records, call: call())


def learners_leave_without_draining(patch: Patch) -> None:
    patch.setattr(Fragment, "is_drained", lambda *_: True)


def old_processes_stay_active(patch: Patch) -> None:
    patch.setattr(Roster, "older", lambda *_: [])


def a_lost_payload_is_not_sent_again(patch: Patch) -> None:
    patch.setattr(Rounds, "payloads_lost", lambda *_: [])


def a_leave_is_not_on_record(patch: Patch) -> None:
    real = DurableState._apply_departed

    def half(self: DurableState, record: Any) -> None:
        real(self, record)
        self.ledger.account(record.session.partition("-")[0], 1).booked = Counter()

    patch.setattr(DurableState, "_apply_departed", half)


def the_seen_counter_lags(patch: Patch) -> None:
    declare = Account.declare

    def late(self: Account, progress: messages.Progress) -> bool:
        seen = self.seen
        fits = declare(self, progress)
        self.seen = seen
        return fits

    patch.setattr(Account, "declare", late)


def learners_leave_while_a_commit_is_written(patch: Patch) -> None:
    patch.setattr(Rounds, "is_committing", lambda *_: False)


def leases_never_run_out(patch: Patch) -> None:
    patch.setattr(SyncerState, "_lapse", lambda *_: [])


def nobody_waits_for_superseded_learners(patch: Patch) -> None:
    patch.setattr(rounds, "OWED_AFTER", 1000)


def a_suspension_is_not_noticed(patch: Patch) -> None:
    patch.setattr(SyncerState, "_stood_still", lambda *_: [])


@pytest.mark.parametrize(
    ("sabotage", "found"),
    [
        (commit_is_booked_twice, "may be added once"),
        (merged_ranges_may_overlap, "merged twice|tokens of progress"),
        (undrained_tokens_are_forgotten, "does not balance"),
        (old_processes_are_not_fenced, "two processes of one learner"),
        (a_quorum_of_one_is_enough, "the quorum is 2"),
        (a_landed_merge_is_not_taken_off_the_parameters, "tokens of progress"),
        (a_superseded_range_is_dropped, "tokens of progress"),
        (what_the_guard_cut_off_counts_as_merged, "tokens of progress|were merged"),
        (a_refusal_is_not_booked, "books disagree"),
        (a_restart_forgets_the_fates, "a restart"),
        (a_leave_is_not_on_record, "does not balance"),
        (the_seen_counter_lags, "does not balance"),
    ],
)
def test_a_sabotaged_machine_is_detected(sabotage: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    sabotage(monkeypatch)

    with pytest.raises((AssertionError, ValueError, TimeoutError), match=found):
        history()
