from __future__ import annotations

import pytest

from lightning_diloco.protocol.messages import Progress
from lightning_diloco.protocol.syncer.ledger import MAX_RANGES, Account, Ledger


def progress(tokens: int, *, landed: int = 0, pending: tuple[tuple[int, int], ...] = (), **discarded: int) -> Progress:
    return Progress(step=1, tokens=tokens, landed=(landed,), pending=(pending,), discarded=discarded)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(1)


@pytest.fixture
def account(ledger: Ledger) -> Account:
    return ledger.account("a", 1)


def test_seen_tokens_that_are_not_merged_are_pending(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.merge(0, 1, 0, 60)

    totals = ledger.totals()
    assert (totals.seen, totals.merged, totals.pending) == (100, 60, 40)
    assert totals.is_exact


def test_a_range_merged_twice_raises(account: Account) -> None:
    account.merge(0, 1, 0, 60)

    with pytest.raises(ValueError, match="may be added once"):
        account.merge(0, 2, 59, 80)


def test_reports_that_leave_out_tokens_are_detected(account: Account) -> None:
    assert account.declare(progress(100, pending=((0, 100),)))
    assert not account.declare(progress(120, pending=((0, 100),)))


def test_reports_that_forget_a_landed_merge_are_detected(account: Account) -> None:
    account.merge(0, 1, 0, 60)

    assert account.declare(progress(100, landed=1, pending=((60, 100),)))
    assert not account.declare(progress(110, landed=1, pending=((0, 110),)))


def test_reports_may_lag_behind_a_commit_that_has_not_landed(account: Account) -> None:
    account.merge(0, 1, 0, 60)

    assert account.declare(progress(100, landed=0, pending=((0, 100),)))
    assert account.num_pending == 40


def test_older_reports_that_arrive_late_are_ignored(account: Account) -> None:
    account.declare(progress(100, landed=1, pending=((0, 40),), overwritten=60))

    assert account.declare(progress(100, landed=1, pending=((0, 100),)))
    assert account.num_discarded == {"overwritten": 60}


def test_a_closed_account_has_nothing_pending_and_books_it_once(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.merge(0, 1, 0, 60)
    account.close("lapsed")
    account.close("undrained")

    assert ledger.totals().discarded == {"lapsed": 40}
    assert ledger.totals().is_exact


def test_absent_tokens_are_a_part_of_the_pending_ones(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.is_absent = True

    assert (ledger.totals().pending, ledger.totals().absent) == (100, 100)


def test_no_term_is_computed_from_the_others(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.booked["refused"] = 7

    assert not ledger.totals().is_exact


def test_a_saved_ledger_is_the_same_ledger(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.merge(0, 1, 0, 60)
    ledger.account("b", 2).close("lapsed")

    assert Ledger(1, ledger.saved()).accounts == ledger.accounts


def test_ranges_that_never_touch_are_settled_and_do_not_accumulate() -> None:
    """With overwrite, every landing drops the tokens between two contributions."""
    ledger = Ledger(2)
    account = ledger.account("a", 1)
    for version in range(1, 5 * MAX_RANGES):
        start = 10 * version
        for p in range(2):
            account.merge(p, version, start, start + 7)
        waits = ((start + 10, start + 17),)
        discarded = {"overwritten": 2 * (start + 10 - 7 * version)}
        progress = Progress(version, start + 17, (version, version), (waits, waits), discarded, 0)
        assert account.declare(progress)
        account.settle()
        assert len(account.merged[0]) <= MAX_RANGES
    assert account.num_merged == 2 * 7 * (5 * MAX_RANGES - 1)
    with pytest.raises(ValueError, match="overlaps"):
        account.merge(0, version + 1, 5, 9)
    account.merge(0, version + 1, start + 10, start + 17)
    restored = Ledger(2, ledger.saved())
    assert restored.accounts == ledger.accounts
    assert restored.totals() == ledger.totals()


def test_ranges_that_have_not_landed_or_are_pending_are_not_settled() -> None:
    account = Ledger(1).account("a", 1)
    for version in range(1, 2 * MAX_RANGES):
        account.merge(0, version, 10 * version, 10 * version + 7)
    account.declare(Progress(1, 10_000, (100,), (((3, 5),),), {}, 0))
    account.settle()
    assert len(account.merged[0]) == 2 * MAX_RANGES - 1, "a range from 3 on may still come"
    account.declare(Progress(2, 10_001, (100,), ((),), {}, 0))
    account.settle()
    assert next(iter(account.merged[0])) == (1010, 1017)
