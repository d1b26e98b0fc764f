"""Data and readers of a simulated fleet; one sample is one token.

A reader records the sample of every token, so that merged samples can be counted without the lease table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Piece
from lightning_diloco.protocol.learner.leases import LeaseHolder

Sample = tuple[int, int, int]
"""(epoch, source, number within the source)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A data set.

    Args:
        sizes: samples of each source.
        range_size: samples per range.
        is_stream: whether a learner must read a source to its end to find its size.
    """

    sizes: tuple[int, ...]
    range_size: int
    is_stream: bool = False

    @property
    def catalogue(self) -> Catalogue:
        """Return the catalogue of the data; a data set of known length has one source."""
        assert self.is_stream or len(self.sizes) == 1
        num_ranges = None if self.is_stream else -(-self.sizes[0] // self.range_size)
        return Catalogue(f"{self}", len(self.sizes), num_ranges)

    def samples(self, epoch: int, source: int, index: int) -> list[Sample]:
        """Return the samples of a range; none beyond the end of the source."""
        first = index * self.range_size
        return [(epoch, source, k) for k in range(first, min(first + self.range_size, self.sizes[source]))]


@dataclass(slots=True)
class Reader:
    """The reader of one process.

    Args:
        trained: the sample of each token that was trained; None for a token read without a lease.
    """

    data: Data
    trained: list[Sample | None] = field(default_factory=list)
    lease: Lease | None = None
    left: list[Sample] = field(default_factory=list)

    def read(self, lessee: LeaseHolder, num_samples: int) -> tuple[Piece, ...]:
        """Read one batch, in pieces."""
        lessee.catalogue = self.data.catalogue
        pieces, missing = [], num_samples
        while missing:
            if self.lease is None or not lessee.holds(self.lease.number):
                self._begin(lessee.take())
            if self.lease is None:
                self.trained += [None] * missing
                return (*pieces, Piece(None, missing, missing))
            now, self.left = self.left[:missing], self.left[missing:]
            self.trained += now
            missing -= len(now)
            index, source = self.lease.index, self.lease.source
            is_last = (index + 1) * self.data.range_size > self.data.sizes[source]
            pieces.append(Piece(self.lease.number, len(now), len(now), not self.left, is_last and not self.left))
            if not self.left:
                self.lease = None
        return tuple(pieces)

    def _begin(self, lease: Lease | None) -> None:
        self.lease = lease
        if lease is not None:
            self.left = self.data.samples(lease.epoch, lease.source, lease.index)[lease.skip :]
