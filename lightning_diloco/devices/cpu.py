"""Fragments whose parameters lie in host memory: the link thread works on the same memory as training, aside of it.

1. A snapshot only promises copies. Parameters stay what they are until an optimizer changes them, after the next
   forward and backward: meanwhile a thread beside copies them slice by slice, and the training thread goes on at once.
2. The training thread settles before parameters change: it copies itself what nobody has begun. At worst that takes as
   long as a copy at the boundary.
3. A landing is made at its boundary, by the training thread alone: a second one that helps is woken on a core that it
   then takes from the first.
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
    """A `FragmentDevice` on the CPU; see `DenseFragments` for its arguments."""

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
