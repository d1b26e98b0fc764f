"""Ranks that hold parts together encode the same bits as one device, and no rank receives more than its share."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.parts import part_of
from lightning_diloco.core.quantize import decode, encode_fragment
from lightning_diloco.devices.part import PartPlan
from lightning_diloco.errors import NonFiniteError
from lightning_diloco.learner.ranks.reshard import Resharder
from tests.devices.test_part_fragments import CUT_COLUMNS, CUT_ELEMENTS, CUT_ROWS, SHAPES

CUTS = {"rows": CUT_ROWS, "columns": CUT_COLUMNS, "elements": CUT_ELEMENTS}


class Threads:
    """`Ranks.swap` between two threads; counts the sent float32 values."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]]) -> None:
        self.rank, self._boxes, self.num_floats = rank, boxes, 0

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        for other, values in enumerate(outgoing):
            if other != self.rank and values.numel():
                self.num_floats += values.numel() if values.dtype == torch.float32 else 0
                self._boxes[self.rank, other].put(values.clone())
        for other, values in enumerate(incoming):
            if other != self.rank and values.numel():
                values.copy_(self._boxes[other, self.rank].get(timeout=10))


def encoded_together(cut: str, wire: str, wholes: dict[int, Tensor], plan: FragmentPlan):
    config, boxes = RunConfig(num_fragments=2, wire=wire, block_size=16, max_slice_numel=100), CUTS[cut]
    lines = {(a, b): queue.SimpleQueue[Tensor]() for a in range(2) for b in range(2)}
    ranks = [Threads(rank, lines) for rank in range(2)]
    plans = [PartPlan(plan, each, 16) for each in boxes]
    dealers = [Resharder(each, plans, config) for each in ranks]
    with ThreadPoolExecutor(1) as other:
        for p, whole_P in wholes.items():
            theirs = other.submit(dealers[1].part, p, plans[1].cut(p, whole_P))
            mine = dealers[0].whole(p, plans[0].cut(p, whole_P))
            yield p, mine, Resharder.bare(theirs.result(10)), ranks


@pytest.fixture
def plan() -> FragmentPlan:
    return FragmentPlan.balanced(SHAPES, num_fragments=2, max_slice_numel=100)


def drawn(plan: FragmentPlan, p: int) -> Tensor:
    layout, generator = plan.layout(p, 16), torch.Generator().manual_seed(p)
    values_P = torch.zeros(layout.padded_numel)
    for entry in layout.entries:
        entry.of(values_P).copy_(torch.randn(entry.numel, generator=generator))
    return values_P


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("wire", ["int8", "int4", "bf16", "fp32"])
def test_ranks_together_encode_the_same_bits_as_one_device(plan, cut, wire):
    wholes = {p: drawn(plan, p) for p in range(2)}
    for p, mine, theirs, ranks in encoded_together(cut, wire, wholes, plan):
        whole_P, layout = wholes[p], plan.layout(p, 16)
        kinds = {"numel": layout.padded_numel, "wire": wire, "block_size": 16}
        expected = encode_fragment(layout, whole_P, wire, 16)
        assert torch.equal(mine.payload, expected)
        assert torch.equal(theirs, part_of(expected, 1, 2, **kinds))
        lost = torch.linalg.vector_norm(whole_P - decode(expected, **kinds))
        assert mine.norm == pytest.approx(float(torch.linalg.vector_norm(whole_P)), rel=1e-5)
        assert mine.relative_error == pytest.approx(float(lost) / mine.norm, rel=1e-4, abs=1e-9)
        assert 0 < sum(rank.num_floats for rank in ranks) < sum(map(len, wholes.values()))


def test_a_value_that_is_not_finite_is_named_by_rank_0(plan):
    whole_P = drawn(plan, 0)
    entry = plan.layout(0, 16).entries[-1]
    entry.of(whole_P)[-1] = torch.inf
    with pytest.raises(NonFiniteError, match=entry.slice.name):
        list(encoded_together("rows", "int8", {0: whole_P}, plan))
