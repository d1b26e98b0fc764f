"""Data leased by a fleet: every range is merged once per epoch although learners join, leave, are killed or cut off."""

from __future__ import annotations

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol.syncer import lease_table, records
from lightning_diloco.protocol.syncer.holdings import Holdings, Unfinished
from lightning_diloco.protocol.syncer.lease_table import LeaseTable
from lightning_diloco.simulate import Data, Fleet, Pace, exactly_once

CONFIG = RunConfig(sync_every=4, num_fragments=2, overlap=1, lease_s=5.0)
TEXT = Data(sizes=(700,), range_size=20)
STREAM = Data(sizes=(130, 40, 0, 77), range_size=20, is_stream=True)
EACH = pytest.mark.parametrize("data", [TEXT, STREAM], ids=["known length", "stream"])


def pace(data: Data, **more: object) -> Pace:
    return Pace(**{"step_s": 0.5, "tokens": 7, "data": data, "drain_s": 20.0, **more})  # type: ignore[arg-type]


def num_repeated(fleet: Fleet) -> tuple[int, int]:
    """Return token x fragment merged more than once, counted from the readers and by the syncer."""
    truth = sum(count.total() - len(count) for count in exactly_once.merged(fleet))
    return truth, fleet.syncer.state.leases.num_repeated


@EACH
def test_without_faults_every_sample_is_merged_once_per_epoch(data: Data) -> None:
    fleet = Fleet(CONFIG)
    for i in range(3):
        fleet.start(f"l{i}", pace(data, step_s=0.4 + 0.1 * i, starts_s=3.0 * i, num_steps=80))
    fleet.run_to_the_end(limit_s=200.0)
    fleet.invariants.audit()

    trained = {sample for count in exactly_once.merged(fleet)[:1] for sample in count}
    assert fleet.syncer.state.leases.epoch >= 2
    assert {sample[0] for sample in trained} >= {0, 1}
    assert num_repeated(fleet)[0] == 0
    first_steps = sum(x.reader.trained.count(None) for x in fleet.learners.values() if x.reader)
    assert num_repeated(fleet)[1] == first_steps * 2, "only what was trained before the first lease came"


@EACH
def test_with_one_learner_then_eight_then_one_nothing_is_left_out_or_repeated(data: Data) -> None:
    fleet = Fleet(CONFIG, seed=2)
    fleet.start("first", pace(data))
    for i in range(7):
        fleet.start(f"l{i}", pace(data, starts_s=5.0 + i, num_steps=20 + 5 * i))
    fleet.run_until(14.0)
    assert [x.state.phase for x in fleet.learners.values() if x.state] == ["stepping"] * 8
    fleet.run_until(80.0)
    fleet.invariants.audit()

    assert [x.state.phase for x in fleet.learners.values() if x.state and not x.is_gone] == ["stepping"]
    assert fleet.syncer.state.leases.epoch >= 1
    assert num_repeated(fleet)[0] == 0


@EACH
def test_ranges_of_a_killed_learner_go_to_others_and_repeated_tokens_are_counted(data: Data) -> None:
    fleet = Fleet(CONFIG, seed=1)
    fleet.start("other", pace(data))
    dies = fleet.start("dies", pace(data))
    fleet.run_until(22.3)
    fleet.kill(dies)
    held = {h.lease.number for h in fleet.syncer.state.leases.held.of(dies.session)}
    assert held
    fleet.run_until(90.0)
    fleet.invariants.audit()

    assert fleet.syncer.state.leases.held.of(dies.session) == []
    assert not held & {h.lease.number for h in fleet.syncer.state.leases.pool}, "somebody has taken them"
    truth, counted = num_repeated(fleet)
    again = sum(x.reader.trained.count(None) for x in fleet.learners.values() if x.reader)
    assert 0 < truth <= counted <= truth + 2 * again


def test_a_learner_that_was_cut_off_continues_ranges_that_no_other_learner_took() -> None:
    fleet = Fleet(CONFIG)
    one = fleet.start("one", pace(TEXT))
    fleet.run_until(20.0)
    fleet.cut(one)
    fleet.run_until(30.0)
    assert fleet.syncer.state.leases.pool
    fleet.heal(one)
    fleet.run_until(40.0)
    fleet.invariants.audit()

    assert not fleet.syncer.state.leases.pool
    assert num_repeated(fleet)[0] == 0


def test_a_learner_without_leases_trains_on_and_these_tokens_are_counted() -> None:
    fleet = Fleet(CONFIG)
    one = fleet.start("one", pace(TEXT, num_steps=300))
    fleet.run_until(20.0)
    assert one.reader
    before = one.reader.trained.count(None)
    fleet.cut(one)
    fleet.run_until(120.0)
    dry = one.reader.trained.count(None) - before
    assert dry > 0
    assert one.state
    assert one.state.step > 200
    fleet.heal(one)
    fleet.run_to_the_end(limit_s=400.0)
    fleet.invariants.audit()

    assert one.state.lessee.num_repeated == one.reader.trained.count(None)
    assert num_repeated(fleet)[1] >= 2 * dry


def test_a_refused_contribution_gives_its_ranges_back() -> None:
    fleet = Fleet(CONFIG)
    one = fleet.start("one", pace(TEXT))
    fleet.run_until(12.0)
    one.bad_payload = True
    fleet.run_until(60.0)
    fleet.invariants.audit()

    assert fleet.syncer.state.ledger.totals().discarded["refused"] > 0
    assert any(isinstance(e.record, records.RangesSettled) and e.record.back for e in fleet.syncer.disk.log)
    assert num_repeated(fleet)[0] > 0, "the other fragment had merged them"


def test_leases_survive_a_restart_of_the_syncer() -> None:
    fleet = Fleet(CONFIG)
    for i in range(2):
        fleet.start(f"l{i}", pace(STREAM, num_steps=120))
    for use_snapshot in (False, True):
        fleet.run_for(15.0)
        fleet.syncer.disk.take_snapshot(fleet.syncer.state)
        fleet.run_for(3.0)
        before = fleet.syncer.state.leases.held.of(next(iter(fleet.learners)))
        fleet.syncer.restart(use_snapshot=use_snapshot)
        after = fleet.syncer.state.leases.held.of(next(iter(fleet.learners)))
        assert [h.lease for h in after] == [h.lease for h in before] != []
    fleet.run_to_the_end(limit_s=300.0)
    fleet.invariants.audit()

    assert num_repeated(fleet)[0] == 0


def test_learners_with_other_data_are_rejected() -> None:
    fleet = Fleet(CONFIG)
    fleet.start("one", pace(TEXT))
    fleet.run_until(5.0)
    other = fleet.start("other", pace(STREAM))
    fleet.run_until(10.0)

    assert other.error is not None
    assert "reads other data than the run" in other.error


# ------------------------------------------------------------------------------------------------- the check can fail


def returns_are_dropped(patch: pytest.MonkeyPatch) -> None:
    apply = LeaseTable.apply

    def forget(self: LeaseTable, record: records.LeaseRecord) -> None:
        apply(self, record)
        self.pool = Holdings()

    patch.setattr(LeaseTable, "apply", forget)


def returns_never_happen(patch: pytest.MonkeyPatch) -> None:
    settled = LeaseTable.settled
    patch.setattr(LeaseTable, "settled", lambda self, session, *, gives_back: settled(self, session, gives_back=False))


def all_that_was_trained_counts_as_merged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unfinished, "is_done", lambda self, holding: holding.span.is_whole)
    patch.setattr(Unfinished, "is_stuck", lambda self, holding: False)
    patch.setattr(lease_table, "merged_prefix", lambda holding, books: (holding.span.samples, holding.span.stop))


def repeats_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "_repeat", lambda *_: None)


@pytest.mark.parametrize(
    ("sabotage", "found"),
    [
        (returns_are_dropped, "neither done nor leased nor waiting"),
        (returns_never_happen, "neither done nor leased nor waiting"),
        (all_that_was_trained_counts_as_merged, "never merged"),
        (repeats_are_not_counted, "were merged again, 0 are counted"),
    ],
)
def test_a_sabotaged_table_is_detected(sabotage, found: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    sabotage(monkeypatch)

    with pytest.raises(AssertionError, match=found):
        test_ranges_of_a_killed_learner_go_to_others_and_repeated_tokens_are_counted(TEXT)
