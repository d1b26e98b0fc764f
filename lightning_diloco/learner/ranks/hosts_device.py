"""One host's device where XLA devices of several hosts run one program.

1. Every host must launch the same graphs in the same order: `ReplicatedDevice.make` sees to it at boundaries.
2. Before training, whoever waits for a graph must have been followed by all: the first host launches, has the others
   launch, and waits then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.devices.base import Encoded
from lightning_diloco.devices.part import PartPlan
from lightning_diloco.devices.xla.hosts import XlaHostFragments
from lightning_diloco.learner.ranks.sharded_device import ShardedDevice


class HostsDevice(ShardedDevice):
    """A `FragmentDevice` for the whole learner, in front of `XlaHostFragments`; boxes: {"rows": ...} of each host."""

    _own: XlaHostFragments

    def _plans_of(self, boxes: Sequence[Mapping[str, Any]]) -> list[PartPlan]:
        self._own.rows_of_hosts = [each["rows"] for each in boxes]
        return []

    def encode(self, snapshot: Any) -> Encoded:
        """See `FragmentDevice.encode`."""
        boundary, own = snapshot
        command = {"do": "delta", "fragment": own.fragment, "boundary": boundary}
        found = self._ranks.collect(command, self._own.sizes(own)[1:], torch.uint8)
        return self._own.encoded(own, [self._own.delta(own), *found])

    def _local_values(self, fragment: int) -> Tensor:
        local_NL = self._own.local(fragment)
        found = self._ranks.collect({"do": "values", "fragment": fragment}, self._sizes(fragment)[1:])
        return self._own.whole(fragment, [self._own.rows(local_NL), *found])

    def _assembled(self, p: int, parts: Sequence[Tensor]) -> Tensor:
        return self._own.whole(p, parts)

    def _sizes(self, p: int) -> list[int]:
        return self._own.numels(p)
