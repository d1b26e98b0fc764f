"""Warms up an optimizer without state that starts late in a run.

A learner that joins late and finds no checkpoint has the run's parameters but no moments. Without moments, the first
steps of an adaptive optimizer are as large as the learning rate for every parameter, whatever its gradient. So in step
k of the first n steps, the rate is multiplied by (k + 1) / (n + 1), where n = sync_every is one exchange period. The
schedule does not see this. An optimizer without a learning rate stays as it is.

Source: our choice; the reason is that of Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.optim import Optimizer


class WarmUp:
    """The warm-up of one learner.

    Args:
        num_steps: n; 0 for no warm-up.
    """

    def __init__(self, num_steps: int = 0) -> None:
        self._num_steps = num_steps
        self._done = 0

    def step_done(self) -> None:
        """Count an inner step."""
        self._done += 1

    @contextlib.contextmanager
    def slowed(self, optimizer: Optimizer) -> Iterator[None]:
        """Lower the optimizer's learning rates for this step of the warm-up."""
        if self._done >= self._num_steps:
            yield
            return
        groups = [group for group in optimizer.param_groups if "lr" in group]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * ((self._done + 1) / (self._num_steps + 1))
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
