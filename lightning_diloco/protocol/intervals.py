"""Sets of half-open integer ranges, for the ledger."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A set of non-negative integers, kept as sorted, disjoint, non-touching ranges [start, stop)."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"

    @property
    def size(self) -> int:
        """How many integers are in the set."""
        return sum(stop - start for start, stop in self)

    def overlap(self, start: int, stop: int) -> int:
        """How many integers of [start, stop) are in the set."""
        return sum(max(0, min(stop, b) - max(start, a)) for a, b in self)

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop); empty ranges change nothing.

        Raises:
            ValueError: a part of it is in the set already.
        """
        if stop <= start:
            return
        if taken := self.overlap(start, stop):
            raise ValueError(f"[{start}, {stop}) overlaps {self} in {taken}; an integer may be added once")
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        touched_starts, touched_stops = self._starts[first:last], self._stops[first:last]
        self._starts[first:last] = [min([start, *touched_starts])]
        self._stops[first:last] = [max([stop, *touched_stops])]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not in the set, in order."""
        gaps, at = [], start
        for a, b in self:
            if b <= at:
                continue
            if a >= stop:
                break
            if a > at:
                gaps.append((at, a))
            at = max(at, b)
        if at < stop:
            gaps.append((at, stop))
        return gaps
