"""Merging against a float64 reference written from the paper."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from lightning_diloco.config import Merge, Wire
from lightning_diloco.core.fragments import FragmentLayout, FragmentPlan, gather
from lightning_diloco.core.merge import merge_fragment
from lightning_diloco.core.quantize import decode, encode, scaled
from lightning_diloco.errors import ConfigError, CorruptMessageError

SHAPES = {"embed": (300, 40), "w": (70, 33), "bias": (33,), "scalar": ()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(deltas: list[Tensor], shares: list[float], kind: Merge) -> Tensor:
    wide = [delta.double() for delta in deltas]
    if kind in ("trimmed_mean", "median") and len(deltas) >= 3:
        ordered = torch.stack(wide).sort(dim=0).values
        cut = (len(deltas) - 1) // 2 if kind == "median" else max(1, len(deltas) // 4)
        return sum(shares) * ordered[cut : len(deltas) - cut].mean(dim=0)
    if kind != "rda":
        return sum(a * v for a, v in zip(shares, wide, strict=True))
    norms = [float(v.norm()) for v in wide]
    radius = sum(a * n for a, n in zip(shares, norms, strict=True))
    direction = sum(a * v / n for a, v, n in zip(shares, wide, norms, strict=True) if n > 0)
    return direction * (radius / direction.norm())


def merged(deltas: list[Tensor], shares: list[float], merge: Merge) -> Tensor:
    """Return the merge of one tensor, rounded to bfloat16."""
    plan = FragmentPlan.balanced({"w": tuple(deltas[0].shape)}, num_fragments=1, max_slice_numel=1 << 20)
    layout = plan.layout(0, 64)
    flats = [gather(layout, {"w": delta}, torch.empty(layout.padded_numel)) for delta in deltas]
    buffers = [encode(flat, wire="fp32", block_size=64, name="w") for flat in flats]
    found, _ = merge_fragment(layout, buffers, shares, wire="fp32", block_size=64, merge=merge)
    return layout.entries[0].of(found).view(deltas[0].shape).float()


def contributions(num: int, wire: Wire) -> tuple[FragmentLayout, list[Tensor]]:
    plan = FragmentPlan.balanced(SHAPES, num_fragments=1, max_slice_numel=4000, mean_names=["embed"])
    layout = plan.layout(0, 64)
    buffers = []
    for m in range(num):
        tensors = {n: normal(*shape, seed=100 * m + k) * (m + 1) for k, (n, shape) in enumerate(SHAPES.items())}
        flat = gather(layout, tensors, torch.empty(layout.padded_numel))
        buffers.append(encode(flat, wire=wire, block_size=64, name="flat"))
    return layout, buffers


@pytest.mark.parametrize("num", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("merge", get_args(Merge))
@pytest.mark.parametrize("takes_part", [1.0, 0.3])
def test_all_merges_equal_the_float64_reference(num: int, merge: Merge, takes_part: float) -> None:
    weights = [1.0, 2.5, 0.25, 4.0, 1.0, 0.5, 2.0, 3.0, 1.5][:num]
    deltas, shares = (
        [normal(40, 7, seed=m) * 3**m for m in range(num)],
        [takes_part * w / sum(weights) for w in weights],
    )
    found = merged(deltas, shares, merge).double()
    torch.testing.assert_close(found, reference(deltas, shares, merge), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("merge", get_args(Merge))
def test_the_whole_fleet_alone_is_the_identity_bit_for_bit(merge: Merge) -> None:
    delta = torch.cat([normal(1000) * 1e-3, torch.tensor([-0.0, 0.0, 1e-42])]).bfloat16().float()
    assert torch.equal(merged([delta], [1.0], merge).view(torch.int32), delta.view(torch.int32))


def test_four_rounds_of_one_learner_each_move_as_far_as_one_mean_of_all() -> None:
    deltas = [normal(1000, seed=m) for m in range(4)]
    together = merged(deltas, [0.25] * 4, "mean")
    apart = sum(merged([delta], [0.25], "rda") for delta in deltas)
    torch.testing.assert_close(apart, together, rtol=0, atol=4 * 2**-9)


def test_rda_keeps_the_norm_where_the_mean_shrinks_it() -> None:
    deltas = [normal(100_000, seed=m) for m in range(16)]
    length = float(deltas[0].norm())
    assert float(merged(deltas, [1 / 16] * 16, "rda").norm()) == pytest.approx(length, rel=0.01)
    assert float(merged(deltas, [1 / 16] * 16, "mean").norm()) == pytest.approx(length / 4, rel=0.01)
    assert float(merged(deltas[:4], [1 / 16] * 4, "rda").norm()) == pytest.approx(length / 4, rel=0.01)


@pytest.mark.parametrize("takes_part", [1.0, 0.1])
def test_directions_that_cancel_fall_back_to_the_mean(takes_part: float) -> None:
    v = normal(500)
    found = merged([v, -3 * v + 1e-4 * normal(500, seed=1)], [takes_part / 2] * 2, "rda")
    torch.testing.assert_close(found, -takes_part * v, atol=2**-7, rtol=0)


def test_zero_contributions_have_no_direction_but_count_in_the_length() -> None:
    v = normal(500)
    torch.testing.assert_close(merged([v, torch.zeros(500)], [0.25, 0.75], "rda"), v / 4, rtol=2**-8, atol=0)
    assert not merged([torch.zeros(500)] * 3, [0.3] * 3, "rda").any()


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16", "fp32"])
@pytest.mark.parametrize("merge", ["rda", "mean"])
@pytest.mark.parametrize("num", [1, 3])
def test_fragment_merge_equals_merging_each_slice_separately(wire: Wire, merge: Merge, num: int) -> None:
    layout, buffers = contributions(num, wire)
    shares = [0.1, 0.2, 0.5][:num]
    found, report = merge_fragment(layout, buffers, shares, wire=wire, block_size=64, merge=merge)
    decoded = [decode(b, numel=layout.padded_numel, wire=wire, block_size=64) for b in buffers]
    expected = torch.zeros(layout.padded_numel, dtype=torch.float64)
    for entry in layout.entries:
        kind = entry.merge if merge == "rda" else "mean"
        entry.of(expected).copy_(reference([entry.of(flat) for flat in decoded], shares, kind))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-7)
    assert report.merged_norm == pytest.approx(float(expected.norm()), rel=1e-5)
    wide = [flat.double() for flat in decoded]
    assert report.norms == pytest.approx([float(v.norm()) for v in wide], rel=1e-9)
    cosines = [float(v @ expected / (v.norm() * expected.norm())) for v in wide]
    assert report.cosines == pytest.approx(cosines, rel=1e-4, abs=1e-5)


def test_slices_longer_than_a_chunk_merge_like_short_ones() -> None:
    plan = FragmentPlan.balanced({"w": (3, 100_001)}, num_fragments=1, max_slice_numel=400_000)
    layout = plan.layout(0, 256)
    flats = [gather(layout, {"w": normal(3, 100_001, seed=m)}, torch.empty(layout.padded_numel)) for m in range(2)]
    buffers = [encode(flat, wire="fp32", block_size=256, name="w") for flat in flats]
    found, _ = merge_fragment(layout, buffers, [0.3, 0.6], wire="fp32", block_size=256, merge="rda")
    (entry,) = layout.entries
    expected = reference([entry.of(flat) for flat in flats], [0.3, 0.6], "rda")
    torch.testing.assert_close(entry.of(found).double(), expected, rtol=2**-8, atol=1e-7)
    assert not found[entry.numel :].any()


def test_single_contribution_is_scaled_by_its_share_and_rounded_to_bfloat16() -> None:
    layout, (buffer,) = contributions(1, "int8")
    found, report = merge_fragment(layout, [buffer], [0.3], wire="int8", block_size=64, merge="rda")
    q, scales = buffer[: layout.padded_numel].view(torch.int8), buffer[layout.padded_numel :].view(torch.bfloat16)
    expected = q.view(-1, 64).float() * (scales.double() * 0.3).float()[:, None]
    assert torch.equal(found, expected.view(-1).bfloat16())
    assert report.cosines == pytest.approx((1.0,))


@pytest.mark.parametrize("wire", get_args(Wire))
@pytest.mark.parametrize("merge", get_args(Merge))
def test_contribution_above_its_limit_is_scaled_down_to_it(wire: Wire, merge: Merge) -> None:
    layout, buffers = contributions(2, wire)
    about = {"wire": wire, "block_size": 64}
    _, free = merge_fragment(layout, buffers, [0.5, 0.5], merge=merge, **about)
    limits = [2 * free.norms[0], free.norms[1] / 3]
    found, report = merge_fragment(layout, buffers, [0.5, 0.5], merge=merge, max_norms=limits, **about)
    assert (report.norms, report.kept) == (free.norms, (1.0, pytest.approx(1 / 3)))
    # Its learner computes the same from the bytes it kept, so it subtracts exactly what was merged.
    shorter = scaled(buffers[1], report.kept[1], numel=layout.padded_numel, **about)
    expected, _ = merge_fragment(layout, [buffers[0], shorter], [0.5, 0.5], merge=merge, **about)
    assert torch.equal(found, expected)
    whole, part = (decode(b, numel=layout.padded_numel, **about) for b in (buffers[1], shorter))
    torch.testing.assert_close(part, whole / 3, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("shares", [[], [1.0], [0.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.6, 0.5], [1.0, math.nan]])
def test_invalid_shares_are_refused(shares: list[float]) -> None:
    layout, buffers = contributions(2, "int8")
    with pytest.raises(ConfigError, match="shares"):
        merge_fragment(layout, buffers, shares, wire="int8", block_size=64, merge="rda")


def test_truncated_contribution_is_corrupt() -> None:
    layout, buffers = contributions(2, "int8")
    with pytest.raises(CorruptMessageError):
        merge_fragment(layout, [buffers[0], buffers[1][:-1]], [0.5, 0.5], wire="int8", block_size=64, merge="rda")
