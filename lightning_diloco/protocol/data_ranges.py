"""Ranges of training samples, their leases, and the tokens trained on them.

1. All learners read the samples of a source in the same order, which is a function of data and epoch. A range is
   `range_size` samples of a source, starting at `index * range_size`. A lease leaves out the first `skip` samples,
   because they are merged already.
2. A number identifies a lease. If another learner takes over a range, it gets a new lease.
3. A span is the range of a learner's token counter that was trained on a lease, from its first sample on, without gaps.

Source: our choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from lightning_diloco.protocol.codec import Value
from lightning_diloco.protocol.limits import MAX_COUNT, MAX_SOURCES, Count, Text


class Catalogue(Value, frozen=True):
    """The data of a run, divided into ranges.

    Args:
        digest: digest of the data, its order and the size of ranges; learners with another digest are refused.
        num_sources: number of sources: 1 for a data set of known length, the number of shards for a stream.
        num_ranges: number of ranges in each source; None: unknown until a learner reaches the end of a source.
    """

    digest: Text
    num_sources: Annotated[int, Meta(ge=1, le=MAX_SOURCES)]
    num_ranges: Annotated[int, Meta(ge=1, lt=MAX_COUNT)] | None


class Lease(Value, frozen=True):
    """The permission to train on a range once.

    Args:
        number: identifies the lease in its run.
        epoch, source, index: position of the range.
        skip: samples at the start of the range that are merged already.
    """

    number: Count
    epoch: Count
    source: Count
    index: Count
    skip: Count = 0


class Span(Value, frozen=True):
    """A learner's progress in a lease.

    Args:
        number: number of the lease.
        samples: samples trained so far, without skipped ones.
        start, stop: their tokens [start, stop) in the learner's counter.
        is_whole: all samples of the range are trained.
        is_last: the source has no ranges after this one.
    """

    number: Count
    samples: Count
    start: Count
    stop: Count
    is_whole: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a batch that comes from one lease.

    Args:
        number: number of the lease; None: the samples were read without a lease, because there was none.
        samples, tokens: samples and tokens in this part.
        is_whole, is_last: as in `Span`.
    """

    number: int | None
    samples: int
    tokens: int
    is_whole: bool = False
    is_last: bool = False


def divided(pieces: Iterable[Piece], tokens: int) -> tuple[Piece, ...]:
    """Divide `tokens` among the pieces in proportion to their samples; the parts sum to `tokens` exactly."""
    pieces = tuple(pieces)
    total, done, given, found = sum(piece.samples for piece in pieces), 0, 0, []
    for piece in pieces:
        done += piece.samples
        share = tokens * done // total - given if total else 0
        given += share
        found.append(replace(piece, tokens=share))
    return tuple(found)


class Holding(Value, frozen=True):
    """A lease with its holder.

    Args:
        lease: the lease.
        session: its holder.
        span: the holder's progress.
        drops: the holder's landing rule drops tokens; dropped tokens then count as done.
    """

    lease: Lease
    session: Text
    span: Span
    drops: bool = False


class Grant(Value, frozen=True):
    """The start of a lease.

    Args:
        lease: the lease.
        taken: number of the lease that it replaces or continues; None: the range was never leased.
        lost_from, lost_to: tokens of the former holder whose samples are trained again.
    """

    lease: Lease
    taken: Count | None = None
    lost_from: Count = 0
    lost_to: Count = 0


class SavedLeases(Value, frozen=True):
    """The lease table as plain values, for snapshots."""

    catalogue: Catalogue | None
    epoch: Count
    next_number: Count
    num_done: Count
    cursors: tuple[tuple[Count, Count], ...]
    sizes: tuple[tuple[Count, Count], ...]
    held: tuple[Holding, ...]
    pool: tuple[Holding, ...]
    repeated: tuple[tuple[str, tuple[tuple[Count, Count], ...]], ...]


EMPTY = SavedLeases(None, 0, 1, 0, (), (), (), (), ())
