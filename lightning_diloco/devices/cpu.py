"""Fragments of a learner whose parameters are in host memory.

1. A snapshot only schedules copies. Parameters do not change until the optimizer step after the next forward and
   backward. Meanwhile another thread copies them slice by slice, and training continues immediately.
2. The training thread calls `settle` before parameters change and runs the remaining copies itself. At worst this takes
   as long as copying everything at the step boundary.
3. The training thread makes a landing alone, at the step boundary. A helper thread would wake up on a core that the
   training thread is using.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan, gather_slice
from lightning_diloco.devices.copies import Copies
from lightning_diloco.devices.dense import DenseFragments


class CpuFragments(DenseFragments):
    """A `FragmentDevice` on the CPU; see `DenseFragments` for the arguments."""

    def __init__(
        self, plan: FragmentPlan, params: Mapping[str, Tensor], config: RunConfig, learner: LearnerConfig
    ) -> None:
        self._copies = Copies()
        super().__init__(plan, params, config, learner)

    def settle(self) -> None:
        """See `FragmentDevice.settle`."""
        self._copies.settle()

    def _copy_params(self, fragment: int, out_P: Tensor) -> None:
        layout, params = self._layouts[fragment], self._aliases(fragment)
        self._copies.promise([partial(gather_slice, layout, k, params, out_P) for k in range(len(layout.entries))])
