"""The outer learning rate "auto": the measured correlation of gradients with a known correlation."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
import torch
from torch import Tensor

from lightning_diloco.core.outer import momentum_by_work, nesterov_step
from lightning_diloco.core.outer_lr import SMALLEST_RHO, Correlation, momentum_dots

MU, NUMEL = 0.6, 1 << 14


def normal(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def measured(gradients: list[Tensor], work: float = 1.0, mu: float = MU) -> list[Correlation]:
    """Return the correlation after each round, with the buffer of real outer steps."""
    master, momentum = torch.zeros(NUMEL), torch.zeros(NUMEL)
    coefs, found = momentum_by_work(mu, work), [Correlation()]
    for gradient in (gradient.bfloat16() for gradient in gradients):
        found.append(found[-1].after(gradient, momentum, mu=mu, work=work, block_size=16))
        nesterov_step(master, momentum, gradient, lr=0.7, momentum_coef=coefs)
    return found[1:]


def correlated(rho: float, rounds: int) -> list[Tensor]:
    """Return gradients whose correlation is rho ** k for k rounds between them."""
    gradients = [normal(0)]
    for seed in range(1, rounds):
        gradients.append(rho * gradients[-1] + (1 - rho**2) ** 0.5 * normal(seed))
    return gradients


@pytest.mark.parametrize("rho", [0.9, 0.6, 0.3, 0.0])
def test_correlation_of_gradients_is_measured(rho: float) -> None:
    found = measured(correlated(rho, 40))
    assert fmean(each.rho for each in found[10:]) == pytest.approx(rho, abs=0.05)


def test_gradients_with_alternating_signs_have_no_correlation() -> None:
    assert measured([(-1) ** k * normal(0) for k in range(20)])[-1].rho < 0.01


@pytest.mark.parametrize("work", [1.0, 0.5, 0.125])
def test_steady_gradient_is_detected_at_once_in_rounds_of_any_work(work: float) -> None:
    found = measured([work * normal(0)] * 40, work)
    assert found[0].rho == Correlation().rho, "there is no momentum to compare with"
    assert all(after.rho > before.rho - 1e-6 for before, after in pairwise(found))
    assert found[-1].rho == pytest.approx(1, abs=0.2 if work < 0.2 else 1e-3)
    assert found[-1].filled == pytest.approx(1 - MU ** (40 * work))


def test_work_may_be_divided_into_rounds_of_one_learner_each() -> None:
    def contribution(m: int, k: int) -> Tensor:
        return normal(0) + 2.5 * normal(1 + 8 * k + m)

    together = measured([sum(contribution(m, k) for m in range(8)) / 8 for k in range(40)])  # type: ignore[misc]
    apart = measured([contribution(m, k) / 8 for k in range(40) for m in range(8)], work=1 / 8)
    assert fmean(each.rho for each in apart[80:]) == pytest.approx(fmean(each.rho for each in together[10:]), abs=0.06)
    cosine = torch.cosine_similarity(contribution(0, 0), contribution(1, 0), dim=0)
    assert cosine < 0.5 * apart[-1].rho, "successive gradients of the rounds apart are far less alike"


def test_lr_is_between_that_of_steady_gradients_and_that_of_noise() -> None:
    assert Correlation(rho=1.0).lr(MU) == 1 - MU
    assert Correlation(rho=0.5).lr(MU) == 1 - 0.5 * MU
    assert Correlation(rho=0.0).lr(MU) == 1 - SMALLEST_RHO * MU
    assert Correlation(rho=0.5).lr(0.0) == 1.0


def test_nothing_is_measured_without_gradient_or_momentum() -> None:
    nothing = torch.zeros(NUMEL)
    assert [each.rho for each in measured([nothing] * 3)] == [Correlation().rho] * 3
    assert [each.rho for each in measured([normal(0)], mu=0.0)] == [Correlation().rho]
    assert [each.rho for each in measured([normal(0)] * 3, work=1e-30)] == [Correlation().rho] * 3


def test_dot_products_are_those_of_float64() -> None:
    gradient, momentum = normal(0, 3 << 18).bfloat16(), normal(1, 3 << 18)
    along, square = momentum_dots(gradient, momentum, block_size=256)
    assert along == pytest.approx(float(gradient.double() @ momentum.double()), rel=1e-9)
    assert square == pytest.approx(float(momentum.double() @ momentum.double()), rel=1e-12)


def test_a_sample_of_blocks_gives_the_correlation_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = correlated(0.6, 20)
    everything = measured(gradients)[-1].rho
    monkeypatch.setattr("lightning_diloco.core.outer_lr.MEASURED_NUMEL", NUMEL // 4)
    assert everything != measured(gradients)[-1].rho == pytest.approx(everything, abs=0.05)
