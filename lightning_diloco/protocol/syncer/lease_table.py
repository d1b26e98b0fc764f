"""Which ranges of the data are trained by whom: leased ahead, done when merged, given back when nobody can finish them.

1. An epoch leases every range of every source once; the next epoch begins when none of this one is left to lease. What
   was given back goes first.
2. A range is done when every token trained on it is merged in every fragment. The ledger knows what is merged; a
   learner says which tokens were trained on what.
3. What is given back begins anew after its longest prefix that is merged in every fragment. Its former holder may take
   it up again where it is; when somebody else takes it, the former holder's tokens after that prefix count as repeated
   wherever they are, or will be, merged. So do tokens trained on what a learner has no lease for.
4. A learner that loses tokens for good (refused, restored) gives back the ranges they belong to.
5. Of a source whose end nobody knows, at most MAX_UNPROVEN ranges are leased that nobody has read from.
6. No number is used twice, even if the disk forgets some: after a restart they go on far above.
7. Only records change the table, except for how far holders say they are, which they say again.

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
    """How much of a holding, from its first sample on, is merged in every fragment.

    Returns:
        Samples of the prefix, and the token after it.
    """
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
    """Where the leasing of new ranges stands; sources are begun in order.

    Args:
        next: by source that was begun in this epoch, the first range nobody has leased.
    """

    epoch: int = 0
    next: dict[int, int] = field(default_factory=dict)

    def draw(
        self, catalogue: Catalogue, sizes: dict[int, int], unproven: Counter[int], preferred: int | None
    ) -> tuple[int, int, int] | None:
        """The next (epoch, source, index): of the preferred source, else of a new one, else where most is left.

        Args:
            sizes: of the sources whose end is known.
            unproven: leases of each source that nobody has read from.
            preferred: where the asker is reading.

        Returns:
            None: first somebody has to find out where sources end.
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
    """All leases of a run.

    Args:
        books: the account of a session.
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

    @property
    def epoch(self) -> int:
        """The newest epoch of which anything was leased."""
        return self._cursor.epoch

    @property
    def num_repeated(self) -> int:
        """Token x fragment merged although somebody else trained, or trains, on the same samples in that epoch."""
        return sum(
            merged.overlap(start, stop)
            for session, ranges in self.repeated.items()
            for merged in self._books(session).merged
            for start, stop in ranges
        )

    # ------------------------------------------------------------------------------------------------ what is decided

    def settled(self, session: str, *, gives_back: bool) -> records.RangesSettled | None:
        """What of this session's is done, and what goes back; None: nothing.

        Args:
            session: whose ledger changed.
            gives_back: everything that is not done goes back: it lapsed, left, or was replaced.
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
        """Leases for this session: its own that it can take up again, and as many others as it wants."""
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
        """The syncer was restarted (rule 6); by the clock, for the disk may forget one restart after another."""
        self._gap = RESTART_GAP + int(1000 * now_s)

    def ends(self, spans: Iterable[Span]) -> list[records.SourceEnded]:
        """Sources that end sooner than was known."""
        found = []
        for span in spans:
            holding = self.held.get(span.number)
            if span.is_last and holding is not None:
                source, size = holding.lease.source, holding.lease.index + 1
                if size < self._sizes.get(source, ENDLESS):
                    found.append(records.SourceEnded(source, size))
        return found

    # ------------------------------------------------------------------------------------------------- what is applied

    def apply(self, record: records.LeaseRecord) -> None:
        """Change the table as this record says; once more changes nothing."""
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
            self._repeat(former.session, grant.lost_from, grant.lost_to)
        if lease.number < self._next_number:
            return
        self._next_number, self._gap = lease.number + 1, 0
        self.held.put(Holding(lease, session, Span(lease.number, 0, 0, 0), drops))
        if grant.taken is None:
            if lease.epoch > self._cursor.epoch:
                self._cursor = Cursor(lease.epoch)
            self._cursor.next[lease.source] = lease.index + 1

    def hear(self, session: str, spans: Iterable[Span]) -> None:
        """How far this session says it is."""
        for span in spans:
            holding = self.held.get(span.number) or self.pool.get(span.number)
            if holding is None or holding.session != session or holding.span == span:
                continue
            table = self.held if span.number in self.held else self.pool
            table.put(replace(holding, span=max(span, holding.span, key=_extent)))

    def follow(self, session: str, ready: Ready) -> None:
        """A contribution was merged: what was trained on a lease that is not the contributor's is repeated."""
        self.hear(session, ready.spans)
        for span in ready.spans:
            holding = self.held.get(span.number) or self.pool.get(span.number)
            if holding is None or holding.session != session:
                self._repeat(session, max(span.start, ready.start), min(span.stop, ready.stop))
        for start, stop in ready.repeats:
            self._repeat(session, max(start, ready.start), min(stop, ready.stop))

    def _repeat(self, session: str, start: int, stop: int) -> None:
        ranges = self.repeated.setdefault(session, IntervalSet())
        for gap in ranges.missing(start, stop):
            ranges.add(*gap)

    def saved(self) -> SavedLeases:
        """Plain values, for snapshots; hand them to the constructor to get the same table."""
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
