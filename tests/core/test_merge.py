"""Merging against a float64 reference written from the paper."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_diloco.config import Merge, Wire
from lightning_diloco.core.fragments import FragmentLayout, FragmentPlan, gather
from lightning_diloco.core.merge import (
    contribution_weight,
    merge_fragment,
    radial_directional_average,
    weighted_mean,
)
from lightning_diloco.core.quantize import decode, encode
from lightning_diloco.errors import ConfigError, CorruptMessageError

SHAPES = {"embed": (300, 40), "w": (70, 33), "bias": (33,), "scalar": ()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(deltas: list[Tensor], weights: list[float], kind: Merge) -> Tensor:
    shares = [weight / sum(weights) for weight in weights]
    wide = [delta.double() for delta in deltas]
    if kind == "mean":
        return sum(a * v for a, v in zip(shares, wide, strict=True))
    norms = [float(v.norm()) for v in wide]
    radius = sum(a * n for a, n in zip(shares, norms, strict=True))
    direction = sum(a * v / n for a, v, n in zip(shares, wide, norms, strict=True) if n > 0)
    return direction * (radius / direction.norm())


def contributions(num: int, wire: Wire) -> tuple[FragmentLayout, list[Tensor]]:
    plan = FragmentPlan.balanced(SHAPES, num_fragments=1, max_slice_numel=4000, mean_names=["embed"])
    layout = plan.layout(0, 64)
    buffers = []
    for m in range(num):
        tensors = {n: normal(*shape, seed=100 * m + k) * (m + 1) for k, (n, shape) in enumerate(SHAPES.items())}
        flat = gather(layout, tensors, torch.empty(layout.padded_numel))
        buffers.append(encode(flat, wire=wire, block_size=64, name="flat"))
    return layout, buffers


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 2**70), st.integers(1, 2**40))
def test_weight_is_exact_for_integers_of_any_size(tokens: int, steps: int) -> None:
    assert contribution_weight(tokens, steps) == tokens * tokens / steps


def test_weights_follow_the_examples_of_the_paper() -> None:
    full = contribution_weight(24 * 1000, 24)
    assert contribution_weight(12 * 1000, 12) / full == 1 / 2
    assert contribution_weight(24 * 500, 24) / full == 1 / 4


@pytest.mark.parametrize(("tokens", "steps"), [(0, 1), (1, 0), (-5, 3), (5, -3)])
def test_weight_without_tokens_or_steps_is_refused(tokens: int, steps: int) -> None:
    with pytest.raises(ConfigError, match=f"tokens={tokens}, steps={steps}"):
        contribution_weight(tokens, steps)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_both_merges_equal_the_float64_reference(num: int) -> None:
    deltas, weights = [normal(40, 7, seed=m) * 3**m for m in range(num)], [1.0, 2.5, 0.25, 4.0, 0.0][:num]
    for merge, kind in ((weighted_mean, "mean"), (radial_directional_average, "rda")):
        found = merge(deltas, weights)
        torch.testing.assert_close(found.double(), reference(deltas, weights, kind), rtol=1e-5, atol=1e-6)


def test_one_contributor_is_the_identity_bit_for_bit() -> None:
    delta = torch.cat([normal(1000) * 1e-3, torch.tensor([-0.0, 0.0, 1e-42])])
    for merge in (weighted_mean, radial_directional_average):
        assert torch.equal(merge([delta], [3.7]).view(torch.int32), delta.view(torch.int32))


def test_rda_keeps_the_norm_where_the_mean_shrinks_it() -> None:
    deltas = [normal(100_000, seed=m) for m in range(16)]
    length = float(deltas[0].norm())
    assert float(radial_directional_average(deltas, [1.0] * 16).norm()) == pytest.approx(length, rel=0.01)
    assert float(weighted_mean(deltas, [1.0] * 16).norm()) == pytest.approx(length / 4, rel=0.01)


def test_directions_that_cancel_fall_back_to_the_mean() -> None:
    v = normal(500)
    found = radial_directional_average([v, -3 * v + 1e-4 * normal(500, seed=1)], [1.0, 1.0])
    torch.testing.assert_close(found, -v, atol=1e-3, rtol=0)


def test_zero_contributions_have_no_direction_but_count_for_the_length() -> None:
    v = normal(500)
    torch.testing.assert_close(radial_directional_average([v, torch.zeros(500)], [1.0, 3.0]), v / 4)
    assert not radial_directional_average([torch.zeros(500)] * 3, [1.0] * 3).any()


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16", "fp32"])
@pytest.mark.parametrize("merge", ["rda", "mean"])
@pytest.mark.parametrize("num", [1, 3])
def test_fragment_merge_equals_merging_each_slice_on_its_own(wire: Wire, merge: Merge, num: int) -> None:
    layout, buffers = contributions(num, wire)
    weights = [1.0, 2.0, 5.0][:num]
    found, report = merge_fragment(layout, buffers, weights, wire=wire, block_size=64, merge=merge)
    decoded = [decode(b, numel=layout.padded_numel, wire=wire, block_size=64) for b in buffers]
    expected = torch.zeros(layout.padded_numel, dtype=torch.float64)
    for entry in layout.entries:
        kind = entry.merge if merge == "rda" else "mean"
        entry.of(expected).copy_(reference([entry.of(flat) for flat in decoded], weights, kind))
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
    found, _ = merge_fragment(layout, buffers, [1.0, 2.0], wire="fp32", block_size=256, merge="rda")
    (entry,) = layout.entries
    expected = reference([entry.of(flat) for flat in flats], [1.0, 2.0], "rda")
    torch.testing.assert_close(entry.of(found).double(), expected, rtol=2**-8, atol=1e-7)
    assert not found[entry.numel :].any()


def test_single_contribution_passes_unchanged_but_for_bfloat16() -> None:
    layout, (buffer,) = contributions(1, "int8")
    found, report = merge_fragment(layout, [buffer], [0.3], wire="int8", block_size=64, merge="rda")
    decoded = decode(buffer, numel=layout.padded_numel, wire="int8", block_size=64)
    assert torch.equal(found, decoded.bfloat16())
    assert report.cosines == pytest.approx((1.0,))


def test_contribution_above_the_norm_guard_is_scaled_down_to_it() -> None:
    layout, buffers = contributions(2, "fp32")
    _, free = merge_fragment(layout, buffers, [1.0, 1.0], wire="fp32", block_size=64, merge="mean")
    guard = sum(free.norms) / 2
    found, report = merge_fragment(
        layout, buffers, [1.0, 1.0], wire="fp32", block_size=64, merge="mean", max_norm=guard
    )
    one, two = (decode(b, numel=layout.padded_numel, wire="fp32", block_size=64) for b in buffers)
    expected = (one + two * guard / free.norms[1]) / 2
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-7)
    assert report.norms == free.norms


@pytest.mark.parametrize("weights", [[], [1.0], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_cannot_be_normalized_are_refused(weights: list[float]) -> None:
    layout, buffers = contributions(2, "int8")
    with pytest.raises(ConfigError, match="weights"):
        merge_fragment(layout, buffers, weights, wire="int8", block_size=64, merge="rda")


def test_truncated_contribution_is_corrupt() -> None:
    layout, buffers = contributions(2, "int8")
    with pytest.raises(CorruptMessageError):
        merge_fragment(layout, [buffers[0], buffers[1][:-1]], [1.0, 1.0], wire="int8", block_size=64, merge="rda")
