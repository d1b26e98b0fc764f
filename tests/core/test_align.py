"""Pseudo-gradients and landings: parameters without progress stay exactly at the anchor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_diloco.core.align import (
    LANDING_CHUNK_NUMEL,
    land_added_,
    land_carry_,
)
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.pseudogradient import pseudo_gradient, store_cast

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
NUMEL = LANDING_CHUNK_NUMEL + 78


def normal(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def landing_base(anchor_new: Tensor, dtype: torch.dtype, sent: Tensor | None = None) -> Tensor:
    stored = anchor_new.to(dtype).float()
    return stored if sent is None else stored + sent


def carry(param: Tensor, anchor_old: Tensor, anchor_new: Tensor, sent: Tensor | None = None) -> Tensor:
    """Return the result of a landing that keeps progress, by its formula."""
    base, wide = landing_base(anchor_new, param.dtype, sent), torch.promote_types(param.dtype, torch.float32)
    return (base + (param.to(wide) - anchor_old.to(param.dtype).to(wide))).to(param.dtype)


@dtypes
def test_learner_that_trained_zero_steps_contributes_zero(dtype: torch.dtype) -> None:
    anchor = normal(0)
    out = torch.empty(NUMEL)
    assert pseudo_gradient(anchor, anchor.to(dtype), out) is out
    assert not out.any()


def test_pseudo_gradient_points_from_local_to_anchor() -> None:
    found = pseudo_gradient(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0]), torch.empty(2))
    assert found.tolist() == [0.5, -1.0]


def test_mixed_dtypes_are_measured_against_what_each_parameter_stores() -> None:
    plan = FragmentPlan.balanced({"a": (5, 7), "b": (40,)}, num_fragments=1, max_slice_numel=99)
    layout = plan.layout(0, 16)
    anchor = normal(0, layout.padded_numel)
    kinds = {"a": torch.bfloat16, "b": torch.float32}
    names = [kinds[entry.slice.name] for entry in layout.entries]
    stored = store_cast(layout, anchor, names, torch.empty_like(anchor))
    for entry, dtype in zip(layout.entries, names, strict=True):
        assert torch.equal(entry.of(stored), entry.of(anchor).to(dtype).float())
    assert not pseudo_gradient(stored, stored.clone(), torch.empty_like(anchor)).any()
    assert torch.equal(store_cast(layout, anchor, names, anchor), stored)


@dtypes
@pytest.mark.parametrize("in_place", [False, True])
def test_parameter_without_progress_lands_exactly_on_the_new_anchor(dtype: torch.dtype, in_place: bool) -> None:
    old, new = normal(0), normal(1) * 1e3
    param = old.to(dtype)
    if in_place:
        land_carry_(param, landing_base(new, dtype), old.to(dtype).float())
    else:
        param = carry(param, old, new)
    assert torch.equal(param, new.to(dtype))


@dtypes
@pytest.mark.parametrize("with_sent", [False, True])
def test_landing_in_place_equals_carry_bit_for_bit(dtype: torch.dtype, with_sent: bool) -> None:
    old, new, sent = normal(0), normal(1), normal(2) * 0.1 if with_sent else None
    param = (old + 0.3 * normal(3)).to(dtype)
    expected = carry(param, old, new, sent)
    land_carry_(param.view(2, -1), landing_base(new, dtype, sent), old.to(dtype).float())
    assert expected.dtype == dtype
    assert torch.equal(param, expected)


def test_carry_keeps_later_steps_and_the_quantization_error() -> None:
    anchor, snapshot, now, merged = (t.double() for t in (normal(0), normal(1), normal(2), normal(3)))
    sent = (anchor - snapshot) * 1.01
    landed = carry(now.float(), anchor.float(), merged.float(), sent.float())
    expected = merged + (now - snapshot) + 0.01 * (anchor - snapshot)
    torch.testing.assert_close(landed.double(), expected, atol=1e-5, rtol=0)


def test_added_landing_takes_a_parameter_without_progress_exactly_to_the_new_anchor() -> None:
    old, update = normal(0), normal(1) * normal(2).mul(5).exp()  # far smaller to far larger than the anchor
    param = old.clone()
    land_added_([param], [update])
    assert torch.equal(param, old + update)


@pytest.mark.parametrize("with_sent", [False, True])
def test_added_landing_is_carry_up_to_rounding(with_sent: bool) -> None:
    old, update, sent = (t.view(2, -1) for t in (normal(0), 0.1 * normal(1), 0.1 * normal(2) * with_sent))
    param = (old + 0.1 * normal(3).view(2, -1)).t().contiguous().t()  # not in rows
    exact = (old.double() + update.double()) + sent.double() + (param.double() - old.double())
    by_carry = carry(param, old, old + update, sent)
    land_added_([param[:1], param[1:]], [(update + sent)[:1], (update + sent)[1:]])
    worst = (by_carry.double() - exact).abs().max()
    assert (param.double() - exact).abs().max() <= worst < 1e-6


def test_added_landing_of_a_parameter_that_is_not_float32_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="sum of the cast values"):
        land_added_([torch.zeros(2, dtype=torch.bfloat16)], [torch.zeros(2)])


def test_landing_writes_into_a_parameter_that_requires_grad() -> None:
    param = torch.nn.Parameter(torch.ones(6, 4))
    land_carry_(param[2:4], torch.full((8,), 5.0), torch.zeros(8))
    assert param.detach().sum(1).tolist() == [4.0, 4.0, 24.0, 24.0, 4.0, 4.0]
