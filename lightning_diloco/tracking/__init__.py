"""Weights & Biases: one run per learner and one for the syncer, in one group, over the fleet's tokens.

Lazy: the syncer's part needs no Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_diloco.tracking.learner import Wandb

__all__ = ["Wandb"]


def __getattr__(name: str) -> type[Wandb]:
    if name != "Wandb":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_diloco.tracking.learner import Wandb

    return Wandb
