"""Minimal models with state that is not a trained parameter."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.strategy.conftest import TinyModel


class WithBatchNorm(TinyModel):
    """Running statistics, and their number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.norm(self.embedding(batch["input_ids"]).flatten(0, 1)).square().mean()


class WithTeacher(TinyModel):
    """A student and a teacher that follows it after each batch, as in BYOL, DINO and mean teachers."""

    decay = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        return super().loss(batch) + (self.student(hidden) - 0.5 * self.teacher(hidden)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.lerp_(theirs, 1 - self.decay)


class WithQueue(WithTeacher):
    """Keys of the last batches, and the position of the next ones, as in MoCo."""

    size = 8

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(self.size, 4))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().on_train_batch_end()
        with torch.no_grad():
            keys = self.teacher(self.embedding(batch["input_ids"])).mean(1)
            at = (torch.arange(len(keys)) + self.next) % self.size
            self.queue[at] = keys
            self.next.add_(len(keys)).remainder_(self.size)


class WithCodebook(TinyModel):
    """A codebook that follows its assigned codes, as a frozen parameter, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(5, 4), requires_grad=False)
        self.register_buffer("usage", torch.zeros(5))

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            codes = self.embedding(batch["input_ids"]).flatten(0, 1)
            nearest = torch.cdist(codes, self.codebook).argmin(1)
            self.usage.mul_(0.9).add_(torch.bincount(nearest, minlength=5), alpha=0.1)
            self.codebook.lerp_(torch.stack([codes[nearest == k].sum(0) for k in range(5)]), 0.1)


OWN_STATE = {
    WithBatchNorm: {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "scale"},
    WithTeacher: {f"teacher.{k}.{kind}" for k in range(3) for kind in ("weight", "bias")} | {"scale"},
    WithCodebook: {"codebook", "usage", "scale"},
}
OWN_STATE[WithQueue] = OWN_STATE[WithTeacher] | {"queue", "next"}


class WithBackbone(TinyModel):
    """A backbone that finetuning callbacks freeze at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.backbone(self.embedding(batch["input_ids"])).square().mean()
