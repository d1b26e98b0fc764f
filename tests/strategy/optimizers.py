"""Minimal optimizers that keep copies of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """SGD without a schedule (arXiv 2405.15682): parameters are y, between z in the state and the average x."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            lr, beta, weight = group["lr"], group["beta"], 1 / (group["k"] + 1)
            for y in (p for p in group["params"] if p.grad is not None):
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, weight).add_(y.grad, alpha=lr * (beta * (1 - weight) - 1))
                z.sub_(y.grad, alpha=lr)
            group["k"] += 1
        return loss


class Lookahead(Optimizer):
    """SGD that moves halfway back after every second step (arXiv 1907.08610)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"k": 0})
        self.fast = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        loss = self.fast.step(closure)
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"] if group["k"] % 2 == 0 else ():
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))
        return loss


class Masters(Optimizer):
    """SGD on float32 copies of parameters of any float type."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                master = self.state[p].setdefault("master", p.detach().to(torch.float32, copy=True))
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(master)
        return loss
