"""A learner's own order of ranges, for a stream without a lease table: source by source, epoch by epoch.

1. Several readers of one stream share each source: each of `parts` readers takes every `parts`-th range. Another reader
   takes the first range of the next source and of the next epoch, because sources may have fewer ranges than readers.
2. A reader goes on to the next source when it finds the end of the present one.
3. The position is that of the next sample to be trained; a reader that begins there continues with it. If all readers
   share one saved position, each continues with the same range number.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_diloco.protocol.data_ranges import Lease, Piece

Position = dict[str, int]
START: Position = {"epoch": 0, "source": 0, "round": 0, "skip": 0}


class OwnOrder:
    """A desk (range_batches.py) for one reader.

    Args:
        num_sources: number of sources of the data.
        part, parts: number of this reader, and of all readers.
        position: where to begin.
    """

    def __init__(self, num_sources: int, *, part: int = 0, parts: int = 1, position: Position = START) -> None:
        self._num_sources, self._part, self._parts = num_sources, part, parts
        self.position = dict(position)
        self._next = dict(position)
        self._num_taken = 0
        self._taken: dict[int, tuple[Position, int]] = {}
        self._ended: set[tuple[int, int]] = set()

    def take(self) -> Lease:
        """Return the next range; there always is one."""
        at = self._next
        if (at["epoch"], at["source"]) in self._ended:
            source = (at["source"] + 1) % self._num_sources
            at = {"epoch": at["epoch"] + (source == 0), "source": source, "round": 0, "skip": 0}
        self._num_taken += 1
        self._taken[self._num_taken] = (at, 0)
        self._next = {**at, "round": at["round"] + 1, "skip": 0}
        index = at["round"] * self._parts + (self._part + at["epoch"] + at["source"]) % self._parts
        return Lease(self._num_taken, at["epoch"], at["source"], index, at["skip"])

    first = take

    def within(self, for_s: float) -> Lease:
        """Return the next range; see `take`."""
        return self.take()

    answer = within

    def need(self, num_ranges: int) -> None:
        """Do nothing, because there always are more ranges."""

    def holds(self, number: int) -> bool:
        """Return whether this range was taken and is not completely trained."""
        return number in self._taken

    def ended(self, lease: Lease) -> None:
        """Note that the source ends with this range or before it."""
        self._ended.add((lease.epoch, lease.source))

    def trained(self, pieces: Iterable[Piece]) -> None:
        """Move the position past these pieces."""
        for piece in pieces:
            assert piece.number is not None
            at, samples = self._taken[piece.number]
            samples += piece.samples
            self._taken[piece.number] = (at, samples)
            self.position = {**at, "skip": at["skip"] + samples}
            if piece.is_whole:
                del self._taken[piece.number]
                self.position = {**at, "round": at["round"] + 1, "skip": 0}
