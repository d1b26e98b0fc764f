"""Training data read range by range: where the order of a data set is somebody else's to say.

1. A desk says which range comes next: the run's lease table (`LeaseDesk`), or an order of one's own (`OwnOrder`).
2. Ranges are read ahead by a thread beside; batches are cut from one after another, across their borders.
3. A batch counts when it was trained with. What was handed out and not trained with, because a loop ended or a trial
   was taken back, comes first the next time.
4. With no lease there, because the syncer cannot be reached, recent ranges are read again, and that is said: training
   never waits. The syncer counts these tokens as repeated.

Source: our choice.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_diloco.protocol.ranges import Catalogue, Lease, Piece

log = logging.getLogger(__name__)

AHEAD = 2
NUM_RECENT = 8
TELL_AGAIN_S = 60.0


class Ranges(Protocol):
    """Data that can be read by ranges, always in the same order."""

    @property
    def catalogue(self) -> Catalogue:
        """What they are called in a run."""
        ...

    def read(self, lease: Lease) -> tuple[Tensor, bool]:
        """The samples of a range, those to be skipped left out, and whether its source ends with it; off-thread."""
        ...


class Desk(Protocol):
    """Says which range comes next."""

    def take(self) -> Lease | None: ...
    def first(self) -> Lease: ...
    def holds(self, number: int) -> bool: ...
    def ended(self, lease: Lease) -> None: ...
    def trained(self, pieces: list[Piece]) -> None: ...


@dataclass(slots=True)
class _Open:
    """A range that batches are cut from; number is None if it is read again for want of a lease."""

    number: int | None
    rows: Tensor
    is_last: bool
    offset: int = 0

    def cut(self, num_rows: int) -> tuple[Tensor, Piece]:
        rows = self.rows[self.offset : self.offset + num_rows]
        self.offset += len(rows)
        is_whole = self.offset == len(self.rows)
        return rows, Piece(self.number, len(rows), 0, is_whole, is_whole and self.is_last)


class RangeLoader:
    """Batches of whole rows, without an end.

    Args:
        ranges: what to read.
        desk: which range comes next.
        batch_size: rows of a batch.
        collate: makes a batch of its rows.
    """

    _num_batches: int | None = None

    def __init__(
        self,
        ranges: Ranges,
        desk: Desk,
        *,
        batch_size: int,
        collate: Callable[[Tensor], Any],
    ) -> None:
        self._desk = desk
        self._batch_size, self._collate = batch_size, collate
        self._ahead = ReadAhead(ranges.read)
        self._recent: deque[Lease] = deque(maxlen=NUM_RECENT)
        self._open: _Open | None = None
        self._waiting: deque[tuple[Tensor, list[Piece]]] = deque()
        self._handed: deque[tuple[Tensor, list[Piece]]] = deque()
        self._tell_again_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        self._waiting.extendleft(reversed(self._handed))
        self._handed.clear()
        num_left = self._num_batches
        while num_left is None or num_left > 0:
            num_left = None if num_left is None else num_left - 1
            batch = self._waiting.popleft() if self._waiting else self._next_batch()
            self._handed.append(batch)
            yield self._collate(batch[0])

    def trained(self, tokens: int) -> None:
        """The oldest batch that was handed out has so many tokens, and is in the step that is being computed."""
        if self._handed:
            self._desk.trained(_with_tokens(self._handed.popleft()[1], tokens))

    def tried(self) -> None:
        """The oldest batch that was handed out is in a trial that will be taken back: it is still to be trained."""
        if self._handed:
            self._waiting.append(self._handed.popleft())

    def close(self) -> None:
        """End the reading thread."""
        self._ahead.close()

    def _next_batch(self) -> tuple[Tensor, list[Piece]]:
        parts: list[Tensor] = []
        pieces: list[Piece] = []
        missing = self._batch_size
        while missing:
            if self._open is None or not self._is_mine(self._open.number):
                self._open = self._next_range()
            rows, piece = self._open.cut(missing)
            parts.append(rows)
            pieces.append(piece)
            missing -= len(rows)
            if piece.is_whole:
                self._open = None
        return torch.cat(parts), pieces

    def _next_range(self) -> _Open:
        while True:
            self._request()
            lease, rows, is_last, is_again = self._ahead.get()
            if is_again and len(rows):
                return _Open(None, rows, is_last)
            if not is_again and self._desk.holds(lease.number):
                if is_last:
                    self._desk.ended(lease)
                if len(rows):
                    self._recent.append(lease)
                return _Open(lease.number, rows, is_last)

    def _request(self) -> None:
        """Have ranges read ahead; without any lease, a recent one again."""
        while self._ahead.num_requested < AHEAD and (lease := self._desk.take()) is not None:
            self._ahead.request(lease)
        if self._ahead.num_requested:
            return
        if not self._recent:
            self._ahead.request(self._desk.first())
            return
        if time.monotonic() > self._tell_again_s:
            log.warning("no leased data is left and the syncer gives none: recent data are read again until it does")
            self._tell_again_s = time.monotonic() + TELL_AGAIN_S
        self._recent.rotate(-1)
        self._ahead.request(replace(self._recent[-1], skip=0), is_again=True)

    def _is_mine(self, number: int | None) -> bool:
        return number is None or self._desk.holds(number)


class SizedRangeLoader(RangeLoader):
    """Iterations that end, each going on where the one before it ended; see `RangeLoader` for the other arguments.

    Args:
        num_batches: of an iteration.
    """

    def __init__(self, ranges: Ranges, desk: Desk, *, num_batches: int, **options: Any) -> None:
        super().__init__(ranges, desk, **options)
        self._num_batches = num_batches

    def __len__(self) -> int:
        assert self._num_batches is not None
        return self._num_batches


_Result = tuple[Lease, Tensor, bool, bool]


class ReadAhead:
    """Reads ranges in a thread, in the order in which they are asked for.

    Args:
        read: one range.
    """

    def __init__(self, read: Callable[[Lease], tuple[Tensor, bool]]) -> None:
        self._read = read
        self._wanted: queue.SimpleQueue[tuple[Lease, bool] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[_Result | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_requested = 0

    def request(self, lease: Lease, *, is_again: bool = False) -> None:
        """Have this read."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diloco-reader", daemon=True)
            self._thread.start()
        self.num_requested += 1
        self._wanted.put((lease, is_again))

    def get(self) -> _Result:
        """What was asked for first; raises what reading it raised."""
        self.num_requested -= 1
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the thread, after the range it is reading; idempotent."""
        self._wanted.put(None)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            lease, is_again = wanted
            try:
                self._found.put((lease, *self._read(lease), is_again))
            except BaseException as error:
                self._found.put(error)


def _with_tokens(pieces: list[Piece], tokens: int) -> list[Piece]:
    """Divide a batch's tokens among its pieces, by samples."""
    total, done, given, found = sum(piece.samples for piece in pieces), 0, 0, []
    for piece in pieces:
        done += piece.samples
        share = tokens * done // total - given
        given += share
        found.append(replace(piece, tokens=share))
    return found
