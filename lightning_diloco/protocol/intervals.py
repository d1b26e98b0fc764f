"""Sets of half-open integer ranges, for the ledger."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Ranges = list[tuple[int, int]]


class IntervalSet:
    """A set of non-negative integers, kept as sorted, disjoint, non-touching ranges [start, stop).

    Integers below `floor` are settled: none can be added, and only the number of those in the set is kept.

    Args:
        ranges: ranges from `floor` on.
        floor: end of the settled integers.
        num_settled: number of integers of the set below `floor`.

    Attributes:
        size: number of integers in the set.
    """

    __slots__ = ("_starts", "_stops", "floor", "num_settled", "size")

    def __init__(self, ranges: Iterable[Iterable[int]] = (), *, floor: int = 0, num_settled: int = 0) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.floor = floor
        self.num_settled = self.size = num_settled
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"

    def _all(self) -> tuple[int, int, list[int], list[int]]:
        return self.floor, self.num_settled, self._starts, self._stops

    @property
    def end(self) -> int:
        """End of the last range that is not settled; 0 if there is none."""
        return self._stops[-1] if self._stops else 0

    def overlap(self, start: int, stop: int) -> int:
        """Return how many integers of [start, stop) are in the set or below the floor."""
        settled = max(0, min(stop, self.floor) - start)
        return settled + sum(max(0, min(stop, b) - max(start, a)) for a, b in self._near(start, stop))

    def settle(self, floor: int) -> None:
        """Raise the floor; a range that contains it stays whole, and the floor then is its start."""
        num = bisect_right(self._stops, floor)
        if num < len(self._starts):
            floor = min(floor, self._starts[num])
        self.num_settled += sum(self._stops[:num]) - sum(self._starts[:num])
        del self._starts[:num], self._stops[:num]
        self.floor = max(self.floor, floor)

    def _near(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return the ranges that overlap [start, stop)."""
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return zip(self._starts[first:last], self._stops[first:last], strict=True)

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop); empty ranges change nothing.

        Raises:
            ValueError: a part of the range is in the set already.
        """
        if stop <= start:
            return
        if taken := self.overlap(start, stop):
            raise ValueError(f"[{start}, {stop}) overlaps {self} in {taken}; an integer may be added once")
        self.size += stop - start
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        touched_starts, touched_stops = self._starts[first:last], self._stops[first:last]
        self._starts[first:last] = [min([start, *touched_starts])]
        self._stops[first:last] = [max([stop, *touched_stops])]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of [start, stop) that are neither in the set nor settled, in order."""
        gaps, at = [], max(start, self.floor)
        if at >= stop or not self._stops or self._stops[-1] <= at:  # usual case: nothing of it is in the set
            return [(at, stop)] if at < stop else []
        for a, b in self._near(at, stop):
            if a > at:
                gaps.append((at, a))
            at = max(at, b)
        if at < stop:
            gaps.append((at, stop))
        return gaps


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ranges as sorted ranges that do not touch."""
    found: Ranges = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif start < stop:
            found.append((start, stop))
    return found


def minus(ranges: Iterable[tuple[int, int]], holes: Iterable[tuple[int, int]]) -> Ranges:
    """Return the parts of the ranges that are in none of the holes."""
    left = [(start, stop) for start, stop in ranges if start < stop]
    for a, b in holes:
        left = [
            part for start, stop in left for part in ((start, min(stop, a)), (max(start, b), stop)) if part[0] < part[1]
        ]
    return left
