"""Batches of training data that is read range by range, in an order that the run or this learner decides.

1. A desk decides which range comes next: the run's lease table (`LeaseClient`), or this learner's order (`OwnOrder`).
2. A background thread prefetches ranges. Batches are cut from them one after another, across their borders.
3. A batch counts when it was trained. A batch that was handed out and not trained, because a loop ended or a trial was
   undone, comes first the next time.
4. If leases have run out, because steps are faster than leases arrive, training waits for the syncer's answer. If the
   syncer cannot be reached, has no lease to give or does not answer within ANSWER_S, this learner chooses ranges itself
   (unleased.py) and logs a warning: training goes on. The syncer counts these tokens as repeated. Before the first
   trained batch, it waits up to START_S for a lease in any case.
5. It asks for enough leases for two batches of FIRST ranges at the start, if that is a small part of an epoch: its pace
   is not known yet.

Source: our choice.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Piece, divided
from lightning_diloco.strategy.data.prefetch import ReadAhead
from lightning_diloco.strategy.data.unleased import Unleased

log = logging.getLogger(__name__)

AHEAD = 2
FIRST = 8
TELL_AGAIN_S = 60.0
START_S = ANSWER_S = 5.0

Batch = tuple[Tensor, tuple[Piece, ...]]


class Ranges(Protocol):
    """Data that can be read by ranges, always in the same order."""

    @property
    def catalogue(self) -> Catalogue:
        """Describes the data to the run."""
        ...

    def read(self, lease: Lease) -> tuple[Tensor, bool]:
        """Return the samples of a range without those to be skipped, and whether its source ends with it.

        The reading thread calls this.
        """
        ...


class Desk(Protocol):
    """Decides which range comes next."""

    def take(self) -> Lease | None: ...
    def first(self) -> Lease: ...
    def within(self, for_s: float) -> Lease | None: ...
    def answer(self, for_s: float) -> Lease | None: ...
    def need(self, num_ranges: int) -> None: ...
    def holds(self, number: int) -> bool: ...
    def ended(self, lease: Lease) -> None: ...
    def trained(self, pieces: Iterable[Piece]) -> None: ...


class Batches(Protocol):
    """Batches of rows, with the ranges that the rows belong to."""

    def next(self) -> Batch: ...
    def trained(self, pieces: Iterable[Piece]) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Open:
    """A range that batches are cut from; number is None if it is read without a lease."""

    number: int | None
    rows: Tensor
    is_last: bool
    offset: int = 0

    def cut(self, num_rows: int) -> tuple[Tensor, Piece]:
        rows = self.rows[self.offset : self.offset + num_rows]
        self.offset += len(rows)
        is_whole = self.offset == len(self.rows)
        return rows, Piece(self.number, len(rows), 0, is_whole, is_whole and self.is_last)


class RangeBatches:
    """Batches of equal size, cut from ranges.

    Args:
        ranges: the data.
        desk: decides which range comes next.
        batch_size: rows per batch.
        seed: seed of the order in which ranges are read without a lease; different for each learner.
    """

    def __init__(self, ranges: Ranges, desk: Desk, *, batch_size: int, seed: int = 0) -> None:
        self._desk, self._batch_size = desk, batch_size
        self._reader = ReadAhead(ranges.read)
        self._num_ahead = AHEAD
        self._unleased = Unleased(ranges.catalogue, seed)
        self._has_read = False
        self._open: _Open | None = None
        self._parts: list[Tensor] = []
        self._pieces: list[Piece] = []
        self._waits_until_s: float | None = None
        self._is_starting = True
        self._tell_again_s = 0.0
        desk.need(min(FIRST, (ranges.catalogue.num_ranges or 0) // (4 * FIRST)))

    def next(self) -> Batch:
        """Return the next batch."""
        batch = self._cut(is_needed=True)
        assert batch is not None
        return batch

    def next_if_there(self) -> Batch | None:
        """Return the next batch; None if it would have to wait for a lease or for a range to be read."""
        return self._cut(is_needed=False)

    def trained(self, pieces: Iterable[Piece]) -> None:
        """Count these pieces: they are part of the step that is being computed."""
        self._is_starting = False
        self._desk.trained(pieces)

    def close(self) -> None:
        """End the reading thread."""
        self._reader.close()

    def _cut(self, *, is_needed: bool) -> Batch | None:
        while missing := self._batch_size - sum(map(len, self._parts)):
            if self._open is None or not self._is_mine(self._open.number):
                if (found := self._next_range(is_needed=is_needed)) is None:
                    return None
                self._open = found
            rows, piece = self._open.cut(missing)
            self._parts.append(rows)
            self._pieces.append(piece)
            if piece.is_whole:
                self._open = None
        parts, pieces, self._parts, self._pieces = self._parts, tuple(self._pieces), [], []
        if len(pieces) > self._num_ahead:
            self._num_ahead = len(pieces)
            self._desk.need(len(pieces))
        return torch.cat(parts), pieces

    def _next_range(self, *, is_needed: bool) -> _Open | None:
        while self._request(is_needed=is_needed) and (is_needed or self._reader.is_there):
            lease, rows, is_last, is_leased = self._reader.get()
            self._has_read |= len(rows) > 0
            if is_last:
                self._unleased.ended(lease)
            if not is_leased and len(rows):
                return _Open(None, rows, is_last)
            if is_leased and self._desk.holds(lease.number):
                if is_last:
                    self._desk.ended(lease)
                return _Open(lease.number, rows, is_last)
        return None

    def _request(self, *, is_needed: bool) -> bool:
        """Prefetch leased ranges, or one without a lease if it is needed now; return whether any was requested."""
        while self._reader.num_requested < self._num_ahead and (lease := self._desk.take()) is not None:
            self._read(lease)
        if not self._reader.num_requested and is_needed:
            self._request_one()
        return self._reader.num_requested > 0

    def _request_one(self) -> None:
        if not self._has_read:
            self._read(self._desk.first())
        elif (lease := self._awaited()) is not None:
            self._read(lease)
        else:
            self._read_unleased()

    def _read(self, lease: Lease) -> None:
        self._unleased.leased(lease)
        self._reader.request(lease)

    def _read_unleased(self) -> None:
        if time.monotonic() > self._tell_again_s:
            log.warning(
                "no leased data is left, and the syncer gives no lease: until it does, this learner reads data of this "
                "epoch that it has not read; other learners may read them as well, so they count as repeated"
            )
            self._tell_again_s = time.monotonic() + TELL_AGAIN_S
        self._reader.request(self._unleased.next(), is_leased=False)

    def _awaited(self) -> Lease | None:
        """Wait for one more lease; at the start always, because the first batch may need more than the first leases."""
        if not self._is_starting:
            return self._desk.answer(ANSWER_S)
        now_s = time.monotonic()
        if self._waits_until_s is None:
            self._waits_until_s = now_s + START_S
        return self._desk.within(max(0.0, self._waits_until_s - now_s))

    def _is_mine(self, number: int | None) -> bool:
        return number is None or self._desk.holds(number)


class RangeLoader:
    """An endless loader of batches.

    Args:
        batches: batches of rows.
        collate: makes a batch from its rows.
    """

    _num_batches: int | None = None

    def __init__(self, batches: Batches, *, collate: Callable[[Tensor], Any]) -> None:
        self._batches, self._collate = batches, collate
        self._waiting: deque[Batch] = deque()
        self._handed: deque[Batch] = deque()

    def __getstate__(self) -> dict[str, Any]:
        """Return no state: a copy, such as in a worker of another loader, holds no leases and cannot be read."""
        return {}

    def __iter__(self) -> Iterator[Any]:
        self._waiting.extendleft(reversed(self._handed))
        self._handed.clear()
        num_left = self._num_batches
        while num_left is None or num_left > 0:
            num_left = None if num_left is None else num_left - 1
            batch = self._waiting.popleft() if self._waiting else self._batches.next()
            self._handed.append(batch)
            yield self._collate(batch[0])

    def trained(self, tokens: int) -> None:
        """Count the oldest batch that was handed out as part of the present step.

        Args:
            tokens: tokens in the batch.
        """
        if self._handed:
            self._batches.trained(divided(self._handed.popleft()[1], tokens))

    def tried(self) -> None:
        """Put back the oldest batch that was handed out, because it belongs to a trial that will be undone."""
        if self._handed:
            self._waiting.append(self._handed.popleft())

    def close(self) -> None:
        """End the reading thread."""
        self._batches.close()


class SizedRangeLoader(RangeLoader):
    """A loader whose iterations end, and continue where the one before ended; see `RangeLoader` for other arguments.

    Args:
        num_batches: batches per iteration.
    """

    def __init__(self, batches: Batches, *, num_batches: int, **options: Any) -> None:
        super().__init__(batches, **options)
        self._num_batches = num_batches

    def __len__(self) -> int:
        assert self._num_batches is not None
        return self._num_batches
