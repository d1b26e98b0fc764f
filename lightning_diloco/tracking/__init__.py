"""Logging to Weights & Biases: one run per learner and one for the syncer, in one group, over the fleet's tokens.

`Wandb` is imported lazily, because the syncer's part does not need Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_diloco.pytorch_lightning import package

if TYPE_CHECKING:
    from lightning_diloco.tracking.learner import Wandb

__all__ = ["Wandb"]


def __getattr__(name: str) -> type[Wandb]:
    if name != "Wandb":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made: type[Wandb] = import_module(f"{package()}.tracking.learner").Wandb
    return made
