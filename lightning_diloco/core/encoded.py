"""Dot products and weighted sums of encoded contributions.

1. The Gram matrix of a slice holds the dot products of all pairs of contributions. Norms, cosines, and the norm of any
   weighted sum follow from it, so a merge reads each contribution twice: once for the matrix, once to add it up.
2. Integers are multiplied exactly, block by block, and the blocks are added up in float64, one after the other. Values
   without scales are multiplied exactly in float64 and added up one after the other. The result does not depend on the
   machine or on the number of threads; a float32 norm of 10^8 values would be 1 % off.
3. A coefficient of a weighted sum is multiplied with a block's scale first, and the product is rounded to float32. Then
   integers are multiplied with it, and contributions are added up in float32, in their order.
4. Contributions stay encoded; only a unit of each is decoded at a time. The padding behind a slice is not read.

Shapes: _MC (contributors, chunk), _EMM (entries, contributors, contributors).
Source: our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core import native
from lightning_diloco.core.blocks import num_blocks, sum_in_order
from lightning_diloco.core.layout import Entry, FragmentLayout
from lightning_diloco.core.quantize import Decoder, scaled

_CHUNK_NUMEL = 1 << 16  # values decoded at a time, per contributor; as float32, 256 KiB, which fit a core's cache

# Each call iterates over the chunks of one slice: it yields (start, the values of all contributors there).
Chunks = Callable[[], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Dot products of contributions before they are merged.

    Args:
        gram_EMM: float64, dot products of each slice of two contributions.
    """

    gram_EMM: Tensor  # noqa: N815

    @property
    def slice_norms(self) -> Tensor:
        """Euclidean norm of each slice of each contribution, float64 (E, M)."""
        return self.gram_EMM.diagonal(dim1=1, dim2=2).sqrt()

    @property
    def norms(self) -> list[float]:
        """Euclidean norm of each contribution over the whole fragment."""
        return self.gram_EMM.sum(0).diagonal().sqrt().tolist()

    @property
    def cosines(self) -> Tensor:
        """Cosines between contributions over the whole fragment, float64 (M, M); 0 if one of the two is zero."""
        gram_MM = self.gram_EMM.sum(0)
        norms_M = gram_MM.diagonal().sqrt()
        return torch.nan_to_num(gram_MM / (norms_M[:, None] * norms_M), 0.0, 0.0, 0.0)

    def only(self, num: int) -> Measured:
        """Return the dot products of the first `num` contributions."""
        return Measured(self.gram_EMM[:, :num, :num])


class Encoded:
    """Encoded contributions to one fragment.

    Args:
        buffers: uint8, from `encode`.
        numel: number of values of the fragment, with padding.
        wire: wire precision of the buffers.
        block_size: values that share a scale.

    Raises:
        CorruptMessageError: see `Decoder`.
    """

    def __init__(self, buffers: Sequence[Tensor], numel: int, wire: Wire, block_size: int) -> None:
        self._buffers, self._numel, self._wire, self._block_size = buffers, numel, wire, block_size
        self._decoders = [Decoder(buffer, numel, wire, block_size) for buffer in buffers]
        self._kernels = native.kernels_for(buffers[0], 8 if wire == "int8" else None)

    def scaled(self, factors: Sequence[float]) -> Encoded:
        """Return the contributions, each multiplied by its factor if that is below 1."""
        numel, wire, size = self._numel, self._wire, self._block_size
        buffers = [
            scaled(buffer, factor, numel=numel, wire=wire, block_size=size) if factor < 1 else buffer
            for buffer, factor in zip(self._buffers, factors, strict=True)
        ]
        return Encoded(buffers, numel, wire, size)

    def measured(self, layout: FragmentLayout) -> Measured:
        """Compute the dot products of all pairs of contributions."""
        num = len(self._decoders)
        gram_EMM = torch.zeros(len(layout.entries), num, num, dtype=torch.float64)
        units = [(e, *unit) for e, entry in enumerate(layout.entries) for unit in self._units(entry, native.UNIT_NUMEL)]
        ranges = [unit[1:] for unit in units]
        if self._kernels is not None:
            kernels, size, payloads = self._kernels, self._block_size, self._addresses()
            found = native.in_parallel(lambda *unit: torch.from_numpy(kernels.dots(payloads, *unit, size)), ranges)
        else:
            found = [self._dots(*unit) for unit in ranges]
        for (e, *_), dots_MM in zip(units, found, strict=True):
            gram_EMM[e] += dots_MM
        return Measured(gram_EMM)

    def weighted_sum(self, entry: Entry, coefs: Sequence[float], out_P: Tensor) -> None:
        """Write sum(coef_m v_m) of one slice to the bfloat16 fragment out_P."""
        if self._kernels is not None:
            kernels, size, out = self._kernels, self._block_size, native.array(out_P)
            payloads, weights = self._addresses(), np.array(coefs)

            def add(start: int, stop: int) -> None:
                kernels.weighted_sum(payloads, weights, start, out[start:stop], size)

            native.in_parallel(add, self._units(entry, native.UNIT_NUMEL))
            return
        for start, stop in self._units(entry, _CHUNK_NUMEL):
            total_C = torch.full((self._padded(stop - start),), -0.0)  # -0.0 + x is x, also for x = -0.0
            for decoder, coef in zip(self._decoders, coefs, strict=True):
                total_C += decoder.read_scaled(start, torch.empty_like(total_C), coef)
            out_P[start:stop] = total_C[: stop - start]

    def chunks(self, entry: Entry) -> Chunks:
        """Return the values of all contributors to a slice, chunk by chunk."""

        def walk() -> Iterator[tuple[int, Tensor]]:
            for start, stop in self._units(entry, _CHUNK_NUMEL):
                values_MC = torch.empty(len(self._decoders), self._padded(stop - start))
                for decoder, row in zip(self._decoders, values_MC, strict=True):
                    decoder.read(start, row)
                yield start - entry.offset, values_MC[:, : stop - start]

        return walk

    def _dots(self, start: int, stop: int) -> Tensor:
        """Return the dot products of all pairs in one unit, float64."""
        size, decoders = self._block_size, self._decoders
        values_MC = torch.zeros(len(decoders), self._padded(stop - start), dtype=torch.float64)
        read = [decoder.read_integers(start, row) for decoder, row in zip(decoders, values_MC, strict=True)]
        values_MC[:, stop - start :] = 0
        scales = [scales_B for scales_B in read if scales_B is not None]
        if not scales:
            return _symmetric(lambda m, n: float(sum_in_order(values_MC[m] * values_MC[n])), len(decoders))
        scales_BM = torch.stack(scales, dim=1).double()
        values_BMS = values_MC.view(len(decoders), -1, size).transpose(0, 1)
        dots_BMM = torch.bmm(values_BMS, values_BMS.transpose(1, 2)).mul_(scales_BM[:, :, None] * scales_BM[:, None, :])
        return sum_in_order(dots_BMM)

    def _addresses(self) -> native.Array:
        """Return the addresses of the integers and of the scales of each contribution, for `kernels.py`."""
        encoded = [decoder.encoded(0, self._numel) for decoder in self._decoders]
        return np.array([[x.data_ptr() for x in pair] for pair in encoded], dtype=np.int64)

    def _units(self, entry: Entry, numel: int) -> list[tuple[int, int]]:
        """Cut a slice into units of whole blocks; returns start and stop in the fragment."""
        at = entry.offset
        return [(at + start, at + stop) for start, stop in native.ranges(entry.numel, self._block_size, numel)]

    def _padded(self, numel: int) -> int:
        return num_blocks(numel, self._block_size) * self._block_size


def _symmetric(element: Callable[[int, int], float], num: int) -> Tensor:
    half = [[element(m, n) for n in range(m + 1)] for m in range(num)]
    return torch.tensor([[half[max(m, n)][min(m, n)] for n in range(num)] for m in range(num)], dtype=torch.float64)
