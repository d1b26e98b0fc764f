"""The lease table alone: the order of ranges, and its state after a restart."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lightning_diloco.protocol.data_ranges import Catalogue, Holding, Lease, Span
from lightning_diloco.protocol.intervals import IntervalSet
from lightning_diloco.protocol.messages import Leases, Progress, Ready
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.holdings import Unfinished
from lightning_diloco.protocol.syncer.lease_table import MAX_UNPROVEN, LeaseTable, merged_prefix
from lightning_diloco.protocol.syncer.ledger import Account
from tests.protocol.harness import Syncer, said


def account(merged: list[tuple[int, int]], pending: tuple[tuple[int, int], ...], tokens: int = 100) -> Account:
    declared = Progress(step=1, tokens=tokens, landed=(0, 0), pending=(pending, ()))
    return Account("l0", 1, [IntervalSet(merged), IntervalSet([(0, tokens)])], [[], []], tokens, declared)


def table(num_ranges: int | None = None, num_sources: int = 3) -> LeaseTable:
    made = LeaseTable(lambda session: account([], ()))
    made.apply(records.Catalogued(Catalogue("text", num_sources, num_ranges)))
    return made


def lease(made: LeaseTable, session: str, wanted: int) -> list[tuple[int, int, int]]:
    grants = made.grants(session, (), wanted)
    made.apply(records.RangesLeased(session, grants, drops=False))
    return [(grant.lease.epoch, grant.lease.source, grant.lease.index) for grant in grants]


def test_every_range_is_leased_once_and_then_the_next_epoch_begins() -> None:
    assert lease(table(num_ranges=3, num_sources=1), "a", 5) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0), (1, 0, 1)]


def test_leases_ahead_in_a_source_of_unknown_length_are_limited() -> None:
    made = table(num_sources=2)
    assert len(lease(made, "a", 5 * MAX_UNPROVEN)) == 2 * MAX_UNPROVEN
    made.apply(records.SourceEnded(0, 3))
    made.apply(records.SourceEnded(1, 3))
    assert lease(made, "b", 1) == [(1, 0, 0)]


def test_learners_read_different_sources_while_there_are_enough() -> None:
    made = table()
    assert {source for _, source, _ in lease(made, "a", 2)} == {0}
    assert {source for _, source, _ in lease(made, "b", 2)} == {1}
    assert lease(made, "a", 1) == [(0, 0, 2)]


@pytest.mark.parametrize(
    ("merged", "pending", "prefix", "is_done", "is_stuck"),
    [
        ([(20, 60)], (), 4, True, False),
        ([(20, 40)], ((40, 60),), 2, False, False),
        ([(20, 40)], (), 2, False, True),
        ([(30, 60)], ((20, 30),), 0, False, False),
        ([(40, 60)], (), 0, False, True),
        ([(20, 45)], ((45, 60),), 2, False, False),
        ([], ((0, 60),), 0, False, False),
    ],
)
def test_a_range_is_done_when_it_is_merged_and_stuck_when_it_can_never_be(
    *, merged: list[tuple[int, int]], pending: tuple[tuple[int, int], ...], prefix: int, is_done: bool, is_stuck: bool
) -> None:
    whole = Holding(Lease(1, 0, 0, 0), "a", Span(1, 4, 20, 60, is_whole=True))
    books = account(merged, pending)
    unfinished = Unfinished(books, [whole])
    assert (unfinished.is_done(whole), unfinished.is_stuck(whole)) == (is_done, is_stuck)
    assert merged_prefix(whole, books) == (prefix, 20 + 10 * prefix)
    drops = Holding(whole.lease, "a", whole.span, drops=True)
    is_done = Unfinished(books, [drops]).is_done(drops)
    assert is_done == (not pending), "what a landing rule dropped is not waited for"


def test_reports_without_a_record_do_not_change_durable_state() -> None:
    made, again = table(), table()
    for one in (made, again):
        lease(one, "a", 1)
        one.apply(records.RangesSettled("a", (), (1,)))
    again.hear("a", [Span(1, 3, 0, 30)])
    grant = records.RangesLeased("b", made.grants("b", (), 1), drops=False)
    for one in (made, again):
        one.apply(grant)
    assert made.saved() == again.saved()


@pytest.mark.parametrize("heard", [[], [Span(1, 2, 20, 40)], [Span(1, 4, 20, 60)]])
def test_a_replay_counts_repeated_tokens_of_a_commit_that_was_installed_late(heard: list[Span]) -> None:
    """A commit is installed when a standby has it. Meanwhile its range may be leased to another learner."""
    books = account([], ())
    live, replayed = (LeaseTable(lambda session: books) for _ in range(2))
    for one in (live, replayed):
        one.apply(records.Catalogued(Catalogue("text", 1, 9)))
        lease(one, "a", 1)
        one.apply(records.RangesSettled("a", (), (1,)))
    live.hear("a", heard)
    commit = Ready(0, 0, 0, 0, start=20, stop=60, steps=1, spans=(Span(1, 4, 20, 60),))
    grant = records.RangesLeased("b", live.grants("b", (), 1), drops=False)
    live.apply(grant)
    live.follow("a", commit)
    replayed.follow("a", commit)
    replayed.apply(grant)
    books.merged[0].add(20, 60)
    assert live.num_repeated == replayed.num_repeated == 2 * 40, "in two fragments"


def calls_of(do: Callable[[], object]) -> int:
    """Return the number of Python function calls."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(None)
    return found


def cost(num_learners: int, num_fragments: int = 8, num_leases: int = 32) -> tuple[int, int]:
    """Return the calls for a heartbeat and for a request, for this number of learners and of leases per learner."""
    names = [f"l{k}" for k in range(num_learners)]
    syncer = Syncer(*names, num_fragments=num_fragments, sync_every=num_fragments)
    spans = {}
    for name in names:
        asked = syncer.ask_ranges(name, wanted=num_leases, num_ranges=10**6)
        (told,) = said(asked, name, Leases)
        spans[name] = [Span(it.number, 1, k, k + 1, is_whole=True) for k, it in enumerate(told.leases)]
    begun = spans[names[0]]
    syncer.ask_ranges(names[0], *begun, num_ranges=10**6)
    syncer.beat(names[0])  # its counter is compared once with those of the others
    heartbeat = calls_of(lambda: syncer.beat(names[0]))
    return heartbeat, calls_of(lambda: syncer.ask_ranges(names[0], *begun, num_ranges=10**6))


def test_the_cost_of_a_message_does_not_depend_on_the_number_of_other_learners() -> None:
    few, many = cost(2), cost(64)
    assert all(of_many < 1.5 * of_few + 70 for of_few, of_many in zip(few, many, strict=True)), (few, many)


def test_the_cost_of_a_request_is_the_sum_of_fragments_and_leases_and_not_their_product() -> None:
    small, large = cost(2, num_fragments=8, num_leases=16)[1], cost(2, num_fragments=64, num_leases=128)[1]
    assert large < 1.5 * 8 * small, (small, large)


def test_lease_numbers_after_a_restart_are_far_above_lost_ones() -> None:
    syncer = Syncer("a")
    syncer.ask_ranges("a", wanted=2)
    used = {h.lease.number for h in syncer.state.leases.held}
    syncer.log = [record for record in syncer.log if not isinstance(record, records.RangesLeased)]
    restarted = syncer.restarted()
    restarted.ask_ranges("a", wanted=2)
    assert restarted.state.leases.held
    assert not used & {h.lease.number for h in restarted.state.leases.held}
