"""A late learner without moments makes small first steps."""

import torch

from lightning_diloco.strategy.recovery.lr_warmup import WarmUp


def test_rates_are_lowered_for_a_step_and_groups_without_a_rate_are_unchanged():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.Optimizer([{"params": params[:1], "lr": 1.0}, {"params": params[1:]}], {})
    with WarmUp(4).slowed(optimizer):
        assert optimizer.param_groups[0]["lr"] == 0.2
        assert "lr" not in optimizer.param_groups[1]
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert "lr" not in optimizer.param_groups[1]
