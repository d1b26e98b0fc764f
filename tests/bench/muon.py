"""Muon for the matrices of decoder layers, AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MUON_LR = 2.0  # times the learning rate of AdamW; the best of 1, 2 and 4 for data parallel training


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW, with one list of parameter groups for a schedule.

    Args:
        module: the model; matrices outside of its embeddings and its head get Muon.
        lr: learning rate of AdamW; Muon has `MUON_LR` times it, with updates scaled to AdamW's size.
        weight_decay: weight decay of matrices.
        betas: betas of AdamW.
    """

    def __init__(self, module: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
        is_muons = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in is_muons]
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        muon = {"lr": MUON_LR * lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self._parts = torch.optim.Muon(matrices, **muon), torch.optim.AdamW(groups, lr=lr, betas=betas)  # type: ignore[arg-type]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        assert self.param_groups[0] is self._parts[0].param_groups[0], "a schedule changes the groups of both"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for part in self._parts:
            part.step()
