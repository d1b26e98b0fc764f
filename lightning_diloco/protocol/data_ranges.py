"""What is said of ranges of samples: the data they are of, who has leased them, and which tokens were trained on them.

1. All learners draw the samples of a source in one order, which is a function of data and epoch. A range is the
   `range_size` samples of a source from `index * range_size` on; `skip` leaves out those that are merged already.
2. A lease is known by its number. A range that goes on to somebody else gets a new one.
3. A span says which tokens of a learner's counter were trained on a lease, from its first sample on and without gaps.

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
    """The data that is leased.

    Args:
        digest: of the data, their order and the size of ranges; learners that read other data are turned away.
        num_sources: sequences of ranges: 1 for a data set of known length, the number of shards for a stream.
        num_ranges: of each source; None: nobody knows before a learner meets its end.
    """

    digest: Text
    num_sources: Annotated[int, Meta(ge=1, le=MAX_SOURCES)]
    num_ranges: Annotated[int, Meta(ge=1, lt=MAX_COUNT)] | None


class Lease(Value, frozen=True):
    """The right to train on a range, once.

    Args:
        number: names this lease, in one run.
        epoch, source, index: which range.
        skip: samples at its beginning that are merged already.
    """

    number: Count
    epoch: Count
    source: Count
    index: Count
    skip: Count = 0


class Span(Value, frozen=True):
    """How far a learner is with a lease.

    Args:
        number: of the lease.
        samples: trained so far, after those skipped.
        start, stop: the tokens of the learner's counter that they were.
        is_whole: there are no more samples in the range.
        is_last: there are no more ranges in the source.
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
        number: of the lease; None: samples read without one, because none was there.
        samples, tokens: in this part.
        is_whole, is_last: as in `Span`.
    """

    number: int | None
    samples: int
    tokens: int
    is_whole: bool = False
    is_last: bool = False


def divided(pieces: Iterable[Piece], tokens: int) -> tuple[Piece, ...]:
    """The same pieces with so many tokens in all, by samples; no token is lost to rounding."""
    pieces = tuple(pieces)
    total, done, given, found = sum(piece.samples for piece in pieces), 0, 0, []
    for piece in pieces:
        done += piece.samples
        share = tokens * done // total - given if total else 0
        given += share
        found.append(replace(piece, tokens=share))
    return tuple(found)


class Holding(Value, frozen=True):
    """A lease, whose it is, and how far that session is with it.

    Args:
        drops: the holder's landing rule drops tokens, so that what it no longer holds counts as merged.
    """

    lease: Lease
    session: Text
    span: Span
    drops: bool = False


class Grant(Value, frozen=True):
    """A lease that begins.

    Args:
        taken: the lease it replaces, or which its holder takes up again; None: nobody had this range.
        lost_from, lost_to: tokens of the former holder that somebody else trains on again.
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
