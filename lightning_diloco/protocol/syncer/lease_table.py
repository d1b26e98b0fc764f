"""The table of data leases, which assigns ranges of the data to learners.

1. An epoch leases each range of each source once. The next epoch begins when all ranges of this one are leased. Ranges
   that were given back are leased first.
2. A range is done when all tokens trained on it are merged in all fragments. The ledger knows which tokens are merged;
   learners report which tokens were trained on which range.
3. A range that was given back is leased again from the end of its longest prefix that is merged in all fragments. Its
   former holder may also continue it where it stopped. If another learner takes it, the former holder's tokens after
   this prefix count as repeated, if they are merged. So do tokens that a learner trained on without a lease.
4. A learner whose tokens are lost (refused, restored) gives back the ranges that they belong to.
5. While the end of a source is unknown, at most MAX_UNPROVEN of its leased ranges may be unread.
6. A lease number is never used twice, even if a disk was rolled back: after a restart, numbers continue far above.
7. Only records change the table. The exception is the progress of holders, which they report again after a restart.

Source: our choice.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from lightning_diloco.protocol.data_ranges import EMPTY, Catalogue, Grant, Holding, Lease, SavedLeases, Span
from lightning_diloco.protocol.intervals import IntervalSet
from lightning_diloco.protocol.messages import Ready
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.holdings import ENDLESS, Holdings, Unfinished
from lightning_diloco.protocol.syncer.ledger import Account

MAX_WANTED = 256
MAX_UNPROVEN = 8
RESTART_GAP = 1 << 20


def merged_prefix(holding: Holding, account: Account) -> tuple[int, int]:
    """Return the number of samples in the longest prefix merged in all fragments, and the token after it."""
    span = holding.span
    through = span.stop
    for p, merged in enumerate(account.merged):
        missing = merged.missing(span.start, span.stop)
        if missing and holding.drops:
            waiting = [*account.unmerged(p), (account.seen, ENDLESS)]
            missing = [(max(a, span.start), b) for a, b in waiting if a < span.stop and b > span.start]
        through = min([through, *(start for start, _ in missing)])
    if through == span.stop:
        return span.samples, through
    size = span.stop - span.start
    samples = (through - span.start) * span.samples // size
    return samples, span.start + samples * size // span.samples


@dataclass(slots=True)
class Cursor:
    """Position up to which ranges were leased; sources are begun in order.

    Args:
        epoch: current epoch.
        next: for each source begun in this epoch, its first range that was never leased.
    """

    epoch: int = 0
    next: dict[int, int] = field(default_factory=dict)

    def draw(
        self, catalogue: Catalogue, sizes: dict[int, int], unproven: Counter[int], preferred: int | None
    ) -> tuple[int, int, int] | None:
        """Draw the next range: of the preferred source, else of a new source, else of the one with most ranges left.

        Args:
            catalogue: the data.
            sizes: number of ranges of each source whose end is known.
            unproven: number of unread leases of each source.
            preferred: source that the learner is reading.

        Returns:
            (epoch, source, index); None while unread ranges of sources with unknown end must be read first.
        """

        def has_more(source: int) -> bool:
            size = sizes.get(source, catalogue.num_ranges)
            return size is None or self.next[source] < size

        def may_lease(source: int) -> bool:
            is_known = catalogue.num_ranges is not None or source in sizes
            return source in self.next and has_more(source) and (is_known or unproven[source] < MAX_UNPROVEN)

        if preferred is None or not may_lease(preferred):
            preferred = len(self.next)
        if preferred >= catalogue.num_sources:
            left = [source for source in self.next if has_more(source)]
            if not left:
                self.epoch, self.next, left = self.epoch + 1, {0: 0}, [0]
            preferred = min(filter(may_lease, left), key=self.next.__getitem__, default=None)
        if preferred is None:
            return None
        index = self.next.get(preferred, 0)
        self.next[preferred] = index + 1
        return self.epoch, preferred, index


class LeaseTable:
    """All data leases of a run.

    Args:
        books: returns the token account of a session.
        saved: a saved table to continue.
    """

    def __init__(self, books: Callable[[str], Account], saved: SavedLeases = EMPTY) -> None:
        self._books = books
        self.catalogue = saved.catalogue
        self.held = Holdings(saved.held)
        self.pool = Holdings(saved.pool)
        self.repeated = {session: IntervalSet(ranges) for session, ranges in saved.repeated}
        self.num_done = saved.num_done
        self._cursor = Cursor(saved.epoch, dict(saved.cursors))
        self._sizes = dict(saved.sizes)
        self._next_number = saved.next_number
        self._gap = 0
        self._merged_to: dict[int, int] = {}  # tokens of present holdings that commits name, up to this one

    @property
    def epoch(self) -> int:
        """The newest epoch with a leased range."""
        return self._cursor.epoch

    @property
    def num_repeated(self) -> int:
        """Merged token x fragment on samples that another learner trained on too in that epoch."""
        return sum(
            merged.overlap(start, stop)
            for session, ranges in self.repeated.items()
            for merged in self._books(session).merged
            for start, stop in ranges
        )

    # ------------------------------------------------------------------------------------------------------ decisions

    def settled(self, session: str, *, gives_back: bool) -> records.RangesSettled | None:
        """Return the record of a session's ranges that are done and that go back to the pool; None if there are none.

        Args:
            session: session whose account changed.
            gives_back: return all unfinished ranges to the pool, because the session lapsed, left or was replaced.
        """
        held, pool = self.held.of(session), self.pool.of(session)
        if not held and not pool:
            return None
        unfinished = Unfinished(self._books(session), [*held, *pool])
        done = [h.lease.number for h in (*held, *pool) if unfinished.is_done(h)]
        ends = set(done)
        back = [h.lease.number for h in held if h.lease.number not in ends and (gives_back or unfinished.is_stuck(h))]
        return records.RangesSettled(session, tuple(done), tuple(back)) if done or back else None

    def grants(self, session: str, known: Iterable[int], wanted: int) -> tuple[Grant, ...]:
        """Return leases for a session: its own former leases that it can continue, and up to `wanted` others."""
        assert self.catalogue is not None
        own = self.pool.of(session)
        unfinished = Unfinished(self._books(session), own)
        may_take_up = {h.lease.number: h.lease for h in own if not unfinished.is_stuck(h)}
        grants = [Grant(may_take_up[number], number) for number in known if number in may_take_up]
        again = {grant.taken for grant in grants}
        pool = sorted(self.pool, key=lambda h: (h.lease.epoch, h.lease.number))
        free = [h for h in pool if h.lease.number not in again][: min(wanted, MAX_WANTED)]
        numbers = itertools.count(self._next_number + self._gap)
        for holding in free:
            samples, through = merged_prefix(holding, self._books(holding.session))
            lease = replace(holding.lease, number=next(numbers), skip=holding.lease.skip + samples)
            grants.append(Grant(lease, holding.lease.number, through, holding.span.stop))
        cursor = Cursor(self._cursor.epoch, dict(self._cursor.next))
        newest = max(self.held.of(session), key=lambda h: h.lease.number, default=None)
        source = newest.lease.source if newest is not None else None
        unproven = Counter(self.held.num_unread)
        for _ in range(min(wanted, MAX_WANTED) - len(free)):
            drawn = cursor.draw(self.catalogue, self._sizes, unproven, source)
            if drawn is None:
                break
            source = drawn[1]
            unproven[source] += 1
            grants.append(Grant(Lease(next(numbers), *drawn)))
        return tuple(grants)

    def resume(self, now_s: float) -> None:
        """Skip lease numbers after a restart (rule 6).

        The gap grows with the clock, because a rolled-back disk may have lost earlier restarts.
        """
        self._gap = RESTART_GAP + int(1000 * now_s)

    def ends(self, spans: Iterable[Span]) -> list[records.SourceEnded]:
        """Return records for the sources that end earlier than known so far."""
        found = []
        for span in spans:
            holding = self.held.get(span.number)
            if span.is_last and holding is not None:
                source, size = holding.lease.source, holding.lease.index + 1
                if size < self._sizes.get(source, ENDLESS):
                    found.append(records.SourceEnded(source, size))
        return found

    # --------------------------------------------------------------------------------------------------------- changes

    def apply(self, record: records.LeaseRecord) -> None:
        """Apply a record; applying it again changes nothing."""
        match record:
            case records.Catalogued():
                self.catalogue = record.catalogue
            case records.SourceEnded():
                self._sizes[record.source] = min(record.size, self._sizes.get(record.source, ENDLESS))
            case records.RangesLeased():
                for grant in record.grants:
                    self._lease(record.session, grant, record.drops)
            case records.RangesSettled():
                for number in record.done:
                    self._merged_to.pop(number, None)
                    found = self.held.pop(number) or self.pool.pop(number)
                    self.num_done += found is not None
                for number in record.back:
                    if holding := self.held.pop(number):
                        self.pool.put(holding)

    def _lease(self, session: str, grant: Grant, drops: bool) -> None:
        lease, former = grant.lease, None if grant.taken is None else self.pool.pop(grant.taken)
        if grant.taken == lease.number:
            if former is not None:
                self.held.put(former)
            return
        if former is not None:
            # A replay applies a commit before this grant even if it was installed after it, and then knows more.
            lost_from = max(grant.lost_from, former.span.start)
            lost_to = max(grant.lost_to, self._merged_to.pop(former.lease.number, 0))
            self._repeat(former.session, lost_from, lost_to)
        if lease.number < self._next_number:
            return
        self._next_number, self._gap = lease.number + 1, 0
        self.held.put(Holding(lease, session, Span(lease.number, 0, 0, 0), drops))
        if grant.taken is None:
            if lease.epoch > self._cursor.epoch:
                self._cursor = Cursor(lease.epoch)
            self._cursor.next[lease.source] = lease.index + 1

    def hear(self, session: str, spans: Iterable[Span]) -> None:
        """Process a session's report of its progress in its ranges."""
        for span in spans:
            holding = self.held.get(span.number) or self.pool.get(span.number)
            if holding is None or holding.session != session or holding.span == span:
                continue
            table = self.held if span.number in self.held else self.pool
            table.put(replace(holding, span=max(span, holding.span, key=_extent)))

    def follow(self, session: str, ready: Ready) -> None:
        """Process a merge. Tokens that were trained on ranges that the contributor does not hold count as repeated."""
        self.hear(session, ready.spans)
        for span in ready.spans:
            holding = self.held.get(span.number) or self.pool.get(span.number)
            if holding is None or holding.session != session:
                self._repeat(session, max(span.start, ready.start), min(span.stop, ready.stop))
            else:
                self._merged_to[span.number] = max(self._merged_to.get(span.number, 0), min(span.stop, ready.stop))
        for start, stop in ready.repeats:
            self._repeat(session, max(start, ready.start), min(stop, ready.stop))

    def _repeat(self, session: str, start: int, stop: int) -> None:
        ranges = self.repeated.setdefault(session, IntervalSet())
        for gap in ranges.missing(start, stop):
            ranges.add(*gap)

    def saved(self) -> SavedLeases:
        """Return the table as plain values, for snapshots; the constructor takes them."""
        return SavedLeases(
            catalogue=self.catalogue,
            epoch=self._cursor.epoch,
            next_number=self._next_number,
            num_done=self.num_done,
            cursors=tuple(sorted(self._cursor.next.items())),
            sizes=tuple(sorted(self._sizes.items())),
            held=tuple(self.held),
            pool=tuple(self.pool),
            repeated=tuple(
                (session, tuple(ranges)) for session, ranges in sorted(self.repeated.items()) if ranges.size
            ),
        )


def _extent(span: Span) -> tuple[int, bool, bool]:
    return span.samples, span.is_whole, span.is_last
