"""One host's device if XLA devices of several hosts run one program.

1. Every host must launch the same graphs in the same order. `ReplicatedDevice.make` ensures this at boundaries.
2. Before training, a host may wait for a graph only after all hosts have launched it. So the first host launches the
   graph, tells the other hosts to launch it, and then waits.
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
    """A `FragmentDevice` for the whole learner, in front of `XlaHostFragments`.

    `boxes` holds {"rows": ...} for each host; see `ReplicatedDevice` for the other arguments.
    """

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
