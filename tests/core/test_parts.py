"""Parts of an encoding: each is the encoding of its values, and together they are the whole encoding."""

from __future__ import annotations

import pytest
import torch

from lightning_diloco.core.parts import joined, part_of, part_range
from lightning_diloco.core.quantize import encode, wire_nbytes

BLOCK = 16


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16", "fp32"])
@pytest.mark.parametrize("numel", [0, 7, 16, 160, 333])
@pytest.mark.parametrize("n", [1, 2, 3, 30])
def test_parts_join_to_the_whole_and_are_encodings_themselves(wire, numel, n):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    whole = encode(x, wire=wire, block_size=BLOCK, name="x")
    ranges = [part_range(k, n, numel, BLOCK) for k in range(n)]
    parts = [part_of(whole, k, n, numel=numel, wire=wire, block_size=BLOCK) for k in range(n)]
    for (start, stop), part in zip(ranges, parts, strict=True):
        assert torch.equal(part, encode(x[start:stop], wire=wire, block_size=BLOCK, name="x"))
        assert part.numel() == wire_nbytes(stop - start, wire, BLOCK)
    assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, numel)
    assert torch.equal(joined(parts, numel=numel, wire=wire, block_size=BLOCK), whole)
    if numel > 2 * BLOCK and n == 2:
        assert not torch.equal(joined(parts[::-1], numel=numel, wire=wire, block_size=BLOCK), whole)


def test_parts_differ_by_at_most_one_block():
    sizes = [stop - start for start, stop in (part_range(k, 3, 100 * BLOCK, BLOCK) for k in range(3))]
    assert max(sizes) - min(sizes) <= BLOCK
