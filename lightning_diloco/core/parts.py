"""Division of an encoded vector into parts that several senders can send.

1. Part k of n holds the blocks from k/n to (k+1)/n of all blocks. Parts differ by at most one block; some may be empty.
2. A part equals the `encode` of its values alone, bit for bit. No scale belongs to two parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.blocks import num_blocks
from lightning_diloco.core.quantize import integers_nbytes


def part_range(k: int, n: int, numel: int, block_size: int) -> tuple[int, int]:
    """Return the first value of part k of n and the one after its last."""
    blocks = num_blocks(numel, block_size)
    start, stop = (min(blocks * at // n * block_size, numel) for at in (k, k + 1))
    return start, stop


def part_of(payload: Tensor, k: int, n: int, *, numel: int, wire: Wire, block_size: int) -> Tensor:
    """Return a copy of part k of n of a whole encoding, uint8.

    Args:
        payload: 1-D uint8 from `encode`.
        k, n: index of the part, and number of parts.
        numel: number of values of the whole vector.
        wire: wire precision.
        block_size: values that share a scale.
    """
    start, stop = part_range(k, n, numel, block_size)
    first, last, end = (integers_nbytes(at, wire, block_size) for at in (start, stop, numel))
    scales = payload[end:].view(-1, 2)[start // block_size : num_blocks(stop, block_size)]
    return torch.cat((payload[first:last], scales.reshape(-1)))


def joined(parts: Sequence[Tensor], *, numel: int, wire: Wire, block_size: int) -> Tensor:
    """Join all parts, in order, to the whole encoding; the inverse of `part_of`."""
    ranges = [part_range(k, len(parts), numel, block_size) for k in range(len(parts))]
    sizes = [integers_nbytes(stop - start, wire, block_size) for start, stop in ranges]
    pairs = list(zip(parts, sizes, strict=True))
    return torch.cat([part[:size] for part, size in pairs] + [part[size:] for part, size in pairs])
