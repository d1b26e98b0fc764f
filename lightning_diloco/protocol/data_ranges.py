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


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The data that is leased.

    Args:
        digest: of the data, their order and the size of ranges; learners that read other data are turned away.
        num_sources: sequences of ranges: 1 for a data set of known length, the number of shards for a stream.
        num_ranges: of each source; None: nobody knows before a learner meets its end.
    """

    digest: str
    num_sources: int
    num_ranges: int | None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to train on a range, once.

    Args:
        number: names this lease, in one run.
        epoch, source, index: which range.
        skip: samples at its beginning that are merged already.
    """

    number: int
    epoch: int
    source: int
    index: int
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """How far a learner is with a lease.

    Args:
        number: of the lease.
        samples: trained so far, after those skipped.
        start, stop: the tokens of the learner's counter that they were.
        is_whole: there are no more samples in the range.
        is_last: there are no more ranges in the source.
    """

    number: int
    samples: int
    start: int
    stop: int
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


@dataclass(frozen=True, slots=True)
class Holding:
    """A lease, whose it is, and how far that session is with it.

    Args:
        drops: the holder's landing rule drops tokens, so that what it no longer holds counts as merged.
    """

    lease: Lease
    session: str
    span: Span
    drops: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease that begins.

    Args:
        taken: the lease it replaces, or which its holder takes up again; None: nobody had this range.
        lost_from, lost_to: tokens of the former holder that somebody else trains on again.
    """

    lease: Lease
    taken: int | None = None
    lost_from: int = 0
    lost_to: int = 0


@dataclass(frozen=True, slots=True)
class SavedLeases:
    """The lease table as plain values, for snapshots."""

    catalogue: Catalogue | None
    epoch: int
    next_number: int
    num_done: int
    cursors: tuple[tuple[int, int], ...]
    sizes: tuple[tuple[int, int], ...]
    held: tuple[Holding, ...]
    pool: tuple[Holding, ...]
    repeated: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


EMPTY = SavedLeases(None, 0, 1, 0, (), (), (), (), ())
