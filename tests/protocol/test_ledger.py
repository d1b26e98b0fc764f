from __future__ import annotations

import pytest

from lightning_diloco.protocol.ledger import Account, Ledger
from lightning_diloco.protocol.messages import Progress


def progress(tokens: int, *, landed: int = 0, pending: tuple[tuple[int, int], ...] = (), **discarded: int) -> Progress:
    return Progress(step=1, tokens=tokens, landed=(landed,), pending=(pending,), discarded=discarded)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(1)


@pytest.fixture
def account(ledger: Ledger) -> Account:
    return ledger.account("a", 1)


def test_what_was_seen_and_not_merged_is_pending(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.merge(0, 1, 0, 60)

    totals = ledger.totals()
    assert (totals.seen, totals.merged, totals.pending) == (100, 60, 40)
    assert totals.is_exact


def test_a_range_merged_twice_raises(account: Account) -> None:
    account.merge(0, 1, 0, 60)

    with pytest.raises(ValueError, match="may be added once"):
        account.merge(0, 2, 59, 80)


def test_books_that_leave_out_tokens_are_noticed(account: Account) -> None:
    assert account.declare(progress(100, pending=((0, 100),)))
    assert not account.declare(progress(120, pending=((0, 100),)))


def test_books_that_forget_a_landed_merge_are_noticed(account: Account) -> None:
    account.merge(0, 1, 0, 60)

    assert account.declare(progress(100, landed=1, pending=((60, 100),)))
    assert not account.declare(progress(110, landed=1, pending=((0, 110),)))


def test_books_may_lag_behind_a_commit_that_has_not_landed(account: Account) -> None:
    account.merge(0, 1, 0, 60)

    assert account.declare(progress(100, landed=0, pending=((0, 100),)))
    assert account.num_pending == 40


def test_older_books_that_arrive_late_are_passed_over(account: Account) -> None:
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


def test_no_term_follows_from_the_others(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.booked["refused"] = 7

    assert not ledger.totals().is_exact


def test_a_saved_ledger_is_the_same_ledger(ledger: Ledger, account: Account) -> None:
    account.declare(progress(100, pending=((0, 100),)))
    account.merge(0, 1, 0, 60)
    ledger.account("b", 2).close("lapsed")

    assert Ledger(1, ledger.saved()).accounts == ledger.accounts
