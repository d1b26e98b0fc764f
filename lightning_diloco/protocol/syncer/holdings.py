"""Data leases by number and by session, and the unfinished part of a session's leases.

1. A fleet may have hundreds of learners, and each may hold more than a hundred leases and report once a second. The
   account of a learner is therefore read once per fragment, not once per fragment and lease.

Source: our choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from lightning_diloco.protocol.data_ranges import Holding, Span
from lightning_diloco.protocol.intervals import Ranges, minus, union
from lightning_diloco.protocol.syncer.ledger import Account

ENDLESS = 2**62


class Holdings:
    """A table of leases, in the order in which they were added.

    Args:
        holdings: leases to start with.

    Attributes:
        num_unread: by source, the number of leases without a trained sample.
    """

    def __init__(self, holdings: Iterable[Holding] = ()) -> None:
        self._by_number: dict[int, Holding] = {}
        self._by_session: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self.num_unread: Counter[int] = Counter()
        for holding in holdings:
            self.put(holding)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def get(self, number: int) -> Holding | None:
        """Return the lease with this number, if there is one."""
        return self._by_number.get(number)

    def of(self, session: str) -> list[Holding]:
        """Return the leases of a session."""
        return [self._by_number[number] for number in self._by_session.get(session, ())]

    def put(self, holding: Holding) -> None:
        """Add a lease, or replace the one with its number."""
        number, former = holding.lease.number, self._by_number.get(holding.lease.number)
        if former is None:
            self._by_session[holding.session][number] = None
        else:
            assert former.session == holding.session, f"lease {number} is {former.session}'s"
        self.num_unread[holding.lease.source] += (not holding.span.samples) - (
            former is not None and not former.span.samples
        )
        self._by_number[number] = holding

    def pop(self, number: int) -> Holding | None:
        """Remove and return the lease with this number, if there is one."""
        holding = self._by_number.pop(number, None)
        if holding is not None:
            numbers = self._by_session[holding.session]
            del numbers[number]
            if not numbers:
                del self._by_session[holding.session]
            self.num_unread[holding.lease.source] -= not holding.span.samples
        return holding


class Unfinished:
    """The part of a session's leases that is not merged in all fragments.

    Args:
        account: token account of the session.
        holdings: its leases.
    """

    def __init__(self, account: Account, holdings: Iterable[Holding]) -> None:
        begun = [holding for holding in holdings if holding.span.samples]
        start = min((holding.span.start for holding in begun), default=0)
        stop = max((holding.span.stop for holding in begun), default=0)
        drops, may_lose = any(holding.drops for holding in begun), account.may_have_lost
        missing, waiting, lost = [], [], []
        for p, merged in enumerate(account.merged if begun else ()):
            gaps = merged.missing(start, stop)
            missing += gaps
            if gaps and (drops or may_lose):
                still = [*account.unmerged(p), (account.seen, ENDLESS)]
                waiting += still
                lost += minus(gaps, still)
        self._missing, self._waiting, self._lost = union(missing), union(waiting), union(lost)

    def is_done(self, holding: Holding) -> bool:
        """Return whether the whole range is trained and merged."""
        return holding.span.is_whole and not _meet(self._waiting if holding.drops else self._missing, holding.span)

    def is_stuck(self, holding: Holding) -> bool:
        """Return whether a part of the range can never be merged."""
        return not holding.drops and _meet(self._lost, holding.span)


def _meet(ranges: Ranges, span: Span) -> bool:
    return any(start < span.stop and span.start < stop for start, stop in ranges)
