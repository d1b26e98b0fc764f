"""The first steps of an optimizer that knows nothing, in a run that is well on its way.

A learner that joins late and finds no checkpoint has the run's parameters but no moments. The adaptive step of an
optimizer without any is as large as its learning rate for every single parameter, whatever its gradient. So the rate of
step k of the first n is multiplied by (k + 1) / (n + 1): one exchange period, n = sync_every, and what a schedule says
from then on. The schedule itself sees nothing of it.

Source: our choice; the reason is that of Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.optim import Optimizer


class WarmUp:
    """Counts the inner steps of one learner.

    Args:
        num_steps: n; 0: there is nothing to do.
    """

    def __init__(self, num_steps: int = 0) -> None:
        self._num_steps = num_steps
        self._done = 0

    def step_done(self) -> None:
        """An inner step is done."""
        self._done += 1

    @contextlib.contextmanager
    def slowed(self, optimizer: Optimizer) -> Iterator[None]:
        """While inside, the optimizer's learning rates are those of this step of the warm-up."""
        if self._done >= self._num_steps:
            yield
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * ((self._done + 1) / (self._num_steps + 1))
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
