"""Optimizer steps that do not pass through Lightning, such as those of `self.optimizers(use_pl_optimizer=False)`.

1. torch calls a hook before and after each step of every optimizer in the process.
2. A step within a step belongs to the outer one: some optimizers wrap others.
3. A step that raised an exception has not ended; the state is reset at the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Around = Callable[[Optimizer], AbstractContextManager[None]]


class RawSteps:
    """Watches all optimizers that hold certain parameters.

    Args:
        params: the parameters.
        around: makes a context that surrounds such a step.

    Attributes:
        is_known: whether a step that Lightning makes is in progress; such steps are ignored here.
    """

    def __init__(self, params: Collection[Tensor], around: Around) -> None:
        self._ids = frozenset(map(id, params))
        self._around = around
        self._stepping: tuple[Optimizer, AbstractContextManager[None]] | None = None
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )
        self.is_known = False

    def batch_begins(self) -> None:
        """Reset the state, because no step is in progress between batches."""
        self._stepping, self.is_known = None, False

    def close(self) -> None:
        """Stop watching; idempotent."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self.is_known or self._stepping is not None or not self._holds_any(optimizer):
            return
        around = self._around(optimizer)
        around.__enter__()
        self._stepping = optimizer, around

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._stepping is not None and self._stepping[0] is optimizer:
            (_, around), self._stepping = self._stepping, None
            around.__exit__(None, None, None)

    def _holds_any(self, optimizer: Optimizer) -> bool:
        return any(id(param) in self._ids for group in optimizer.param_groups for param in group["params"])
