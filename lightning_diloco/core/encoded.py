"""Contributions as they come, decoded chunk by chunk, and what they look like side by side.

1. Lengths are taken per chunk and added up in float64, in the fixed order of the chunks: a float32 norm of 10^8
   elements is 1 % off.
2. Cosines are for judging only (`syncer/judging.py`); no bit of an anchor depends on them.

Shapes: _MC (contributors, chunk), _EM (entries, contributors), _MM (contributors, contributors).
Source: our choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.layout import Entry, FragmentLayout
from lightning_diloco.core.quantize import Decoder, scaled

_CHUNK_NUMEL = 1 << 17  # of each contributor: eight of them take 4 MiB, a share of a server's last-level cache

# Every call walks over the chunks of one slice from the start: yields (start, the values of all contributors there).
Chunks = Callable[[], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What contributions look like before they are merged.

    Args:
        norms_EM: float64, Euclidean norm of each slice of each contribution.
        cosines_MM: float64, between contributions over the whole fragment; 0 where one of them is zero, or too large
            for float32 to tell.
    """

    norms_EM: Tensor  # noqa: N815
    cosines_MM: Tensor  # noqa: N815

    @property
    def norms(self) -> list[float]:
        """Of each contribution over the whole fragment."""
        return whole_norms(self.norms_EM)

    def only(self, num: int) -> Measured:
        """Of the first so many contributions."""
        return Measured(self.norms_EM[:, :num], self.cosines_MM[:num, :num])


class Encoded:
    """Encoded contributions, decoded chunk by chunk into one scratch buffer.

    Args:
        buffers: uint8, from `encode`.
        numel: of the fragment, padding included.
        wire, block_size: of the buffers.
    """

    def __init__(self, buffers: Sequence[Tensor], numel: int, wire: Wire, block_size: int) -> None:
        self._buffers, self._numel, self._wire, self._block_size = buffers, numel, wire, block_size
        self._decoders = [Decoder(buffer, numel, wire, block_size) for buffer in buffers]
        self._scratch_MC = torch.empty(len(buffers), _CHUNK_NUMEL, dtype=torch.float32)

    def scaled(self, factors: Sequence[float]) -> Encoded:
        """Those whose factor is below 1, times that factor."""
        numel, wire, size = self._numel, self._wire, self._block_size
        buffers = [
            scaled(buffer, factor, numel=numel, wire=wire, block_size=size) if factor < 1 else buffer
            for buffer, factor in zip(self._buffers, factors, strict=True)
        ]
        return Encoded(buffers, numel, wire, size)

    def norms(self, layout: FragmentLayout) -> Tensor:
        """float64 (E, M)."""
        return self._measure(layout, None)

    def measured(self, layout: FragmentLayout) -> Measured:
        """Norms, and how alike contributions are, in one pass."""
        dots_MM = torch.zeros(len(self._buffers), len(self._buffers), dtype=torch.float64)
        norms_EM = self._measure(layout, dots_MM)
        norms_M = norms_EM.square().sum(0).sqrt()
        return Measured(norms_EM, torch.nan_to_num(dots_MM / (norms_M[:, None] * norms_M), 0.0, 0.0, 0.0))

    def _measure(self, layout: FragmentLayout, dots_MM: Tensor | None) -> Tensor:
        norms_EM = torch.zeros(len(layout.entries), len(self._decoders), dtype=torch.float64)
        for entry, norms_M in zip(layout.entries, norms_EM, strict=True):
            squares = [0.0] * len(self._decoders)
            for _, values_MC in self.chunks(entry)():
                squares = [square + norm(values) ** 2 for square, values in zip(squares, values_MC, strict=True)]
                if dots_MM is not None:
                    dots_MM += values_MC @ values_MC.T
            norms_M.copy_(torch.tensor([math.sqrt(square) for square in squares], dtype=torch.float64))
        return norms_EM

    def chunks(self, entry: Entry) -> Chunks:
        """The values of all contributors to a slice."""

        def walk() -> Iterator[tuple[int, Tensor]]:
            for start in range(0, entry.numel, _CHUNK_NUMEL):
                numel = min(_CHUNK_NUMEL, entry.numel - start)
                padded = -(-numel // self._block_size) * self._block_size
                for decoder, row in zip(self._decoders, self._scratch_MC, strict=True):
                    decoder.read(entry.offset + start, row[:padded])
                yield start, self._scratch_MC[:, :numel]

        return walk


def norm(values: Tensor) -> float:
    """Euclidean, added up in float64."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def whole_norms(norms_EM: Tensor) -> list[float]:
    """Norms over the whole fragment, of norms by entry."""
    return [float(norm) for norm in norms_EM.square().sum(0).sqrt()]
