"""The outer step against torch.optim.SGD, and publishing without drift."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.outer import Momentum, apply_update, momentum_by_work, nesterov_step, publish
from lightning_diloco.errors import ConfigError, CorruptMessageError, NonFiniteError


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 1000, (1 << 18) + 37])
def test_nesterov_equals_torch_sgd_except_for_fused_roundings(numel: int, dtype: torch.dtype) -> None:
    ours, momentum = normal(numel, 0), torch.zeros(numel)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 6):
        gradient = normal(numel, step).to(dtype)
        theirs.grad = gradient.float()
        optimizer.step()
        nesterov_step(ours, momentum, gradient, lr=0.7, momentum_coef=Momentum(0.9, 0.9))
        assert torch.equal(momentum, optimizer.state[theirs]["momentum_buffer"])
        # Values stay below 32. Where SGD's CPU fuses multiply and add, it rounds once: half a unit, 2**-20, less.
        assert float(theirs.detach().abs().max()) < 32
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=step * 2 * 2**-20)


def test_outer_step_with_lr_one_and_no_momentum_lands_on_the_contribution() -> None:
    anchor, momentum = torch.tensor([1.0, 2.0]), torch.zeros(2)
    nesterov_step(anchor, momentum, torch.tensor([0.25, -0.5]), lr=1.0, momentum_coef=Momentum(0.0, 0.0))
    assert anchor.tolist() == [0.75, 2.5]


def test_momentum_of_a_full_round_is_plain_nesterov() -> None:
    assert momentum_by_work(0.6, 1.0) == Momentum(decay=0.6, push=0.6)
    assert momentum_by_work(0.6, 4.0) == Momentum(decay=0.6, push=0.6)
    assert momentum_by_work(0.0, 0.1) == Momentum(decay=0.0, push=0.0)
    with pytest.raises(ConfigError, match="work=0"):
        momentum_by_work(0.6, 0)


@pytest.mark.parametrize("steps", [24, 12, 4, 1])
def test_momentum_moves_the_anchor_by_work_for_any_division_into_rounds(steps: int) -> None:
    anchor, momentum = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    coefs = momentum_by_work(0.6, steps / 24)
    per_round = torch.tensor([steps / 24])
    for _ in range(40 * 24 // steps):
        before = anchor.item()
        nesterov_step(anchor, momentum, per_round, lr=0.8, momentum_coef=coefs)
    assert (before - anchor.item()) * 24 / steps == pytest.approx(0.8 / (1 - 0.6), rel=1e-6)
    # With push = decay, as with a plain coefficient of mu ** s, the anchor would move 10 times too far for one step.
    momentum.zero_()
    for _ in range(40 * 24 // steps):
        before = anchor.item()
        nesterov_step(anchor, momentum, per_round, lr=0.8, momentum_coef=Momentum(coefs.decay, coefs.decay))
    assert steps == 24 or (before - anchor.item()) * 24 / steps > 1.5 * 0.8 / (1 - 0.6)


@pytest.mark.parametrize("wire", get_args(Wire))
def test_published_follows_the_master_without_drift_and_equally_everywhere(wire: Wire) -> None:
    numel = 64 * 40
    master = normal(numel, 0)
    published, learner = master.clone(), master.clone()
    residuals = []
    for step in range(1, 201):
        master += 0.01 * normal(numel, step)
        update = publish(master, published, wire=wire, block_size=64)
        apply_update(learner, update, wire=wire, block_size=64)
        assert torch.equal(learner, published)
        residuals.append(float((master - published).norm() / master.norm()))
    bound = {"int8": 2e-4, "int4": 4e-3, "bf16": 1e-4, "fp32": 1e-7}[wire]
    assert max(residuals) < bound
    assert sum(residuals[-50:]) <= 1.1 * sum(residuals[:50]) + 1e-6


def test_update_in_pieces_equals_one_addition() -> None:
    numel = (1 << 18) + 256
    master, published = normal(numel, 0), normal(numel, 1)
    learner = published.clone()
    update = publish(master, published, wire="fp32", block_size=256)
    assert torch.equal(published, learner + (master - learner))
    apply_update(learner, update, wire="fp32", block_size=256)
    assert torch.equal(learner, published)


def test_bad_updates_change_nothing() -> None:
    anchor = torch.ones(128)
    with pytest.raises(CorruptMessageError):
        apply_update(anchor, torch.zeros(5, dtype=torch.uint8), wire="int8", block_size=64)
    with pytest.raises(NonFiniteError, match="outer update"):
        publish(torch.full((128,), torch.nan), anchor, wire="int8", block_size=64)
    assert torch.equal(anchor, torch.ones(128))
