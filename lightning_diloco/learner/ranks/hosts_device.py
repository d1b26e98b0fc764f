"""The device of the first host where XLA devices of several hosts run one program.

1. Every host must launch the same graphs in the same order. So all that was promised for a boundary is made at once, in
   the order in which the other hosts make it; when the machine asks for it, it is there. What the machine then leaves
   out has been made all the same.
2. Before training, whoever waits for a graph must have been followed by all: the first host launches, has the others
   launch, and waits then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import Encoded, Update
from lightning_diloco.devices.xla.hosts import XlaHostFragments
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.sharded_device import ShardedDevice


class HostsDevice(ShardedDevice):
    """A `FragmentDevice` for the whole learner.

    Args:
        own: this host's part.
        ranks: of this learner, one for each host.
        plan: of the run.
        config: of the run.
        boxes: {"rows": ...}, of each host.
    """

    _part: XlaHostFragments  # type: ignore[assignment]

    def __init__(
        self,
        own: XlaHostFragments,
        ranks: Ranks,
        *,
        plan: FragmentPlan,
        config: RunConfig,
        boxes: Sequence[Mapping[str, Sequence[int]]],
    ) -> None:
        super().__init__(own, ranks, plan=plan, config=config, boxes=())  # type: ignore[arg-type]
        own.rows_of_hosts = [each["rows"] for each in boxes]
        self._staged: dict[int, Any] = {}
        self._adopted: dict[int, Tensor] = {}
        self._snapshots: dict[int, Any] = {}
        self._landed_before: set[int] = set()

    # --- training thread -----------------------------------------------------------------------------------------

    def make(self, land: Sequence[int], snapshot: Sequence[int]) -> None:
        """See `Relay.make`."""
        for p in land:
            if p in self._adopted:
                self._part.adopt(p, self._adopted.pop(p))
            else:
                self._part.land(p, self._staged.pop(p))
            self.counts[p] += 1
        self._landed_before = set(land)
        self._snapshots = {p: (self._ranks.num_begun, self._part.snapshot(p)) for p in snapshot}

    def snapshot(self, fragment: int) -> Any:
        """See `FragmentDevice.snapshot`: the one made at this boundary."""
        return self._snapshots.pop(fragment)

    def adopt(self, fragment: int, values: Tensor) -> None:
        """See `FragmentDevice.adopt`."""
        if fragment not in self._landed_before:
            return super().adopt(fragment, values)
        self._expected.remove(fragment)
        return self._note_landed(fragment)

    def land(self, fragment: int, staged: Any) -> None:
        """See `FragmentDevice.land`."""
        if fragment not in self._landed_before:  # at the very end the first host lands, and the others after it
            self._staged.pop(fragment)
            return super().land(fragment, staged)
        return self._note_landed(fragment)

    def _note_landed(self, fragment: int) -> None:
        self._landed_before.remove(fragment)
        self.landed.append(fragment)

    # --- link thread ---------------------------------------------------------------------------------------------

    def expect(self, fragment: int, values: Tensor) -> None:
        """See `Relay.expect`."""
        super().expect(fragment, values)
        self._adopted[fragment] = values

    def stage(self, fragment: int, update: Update) -> Any:
        """See `FragmentDevice.stage`."""
        self._staged[fragment] = super().stage(fragment, update)
        return self._staged[fragment]

    def encode(self, snapshot: Any) -> Encoded:
        """See `FragmentDevice.encode`."""
        boundary, own = snapshot
        command = {"do": "delta", "fragment": own.fragment, "boundary": boundary}
        found = self._ranks.collect(command, self._part.sizes(own)[1:], torch.uint8)
        return self._part.encoded(own, [self._part.delta(own), *found])

    # --- either --------------------------------------------------------------------------------------------------

    def _local_values(self, fragment: int) -> Tensor:
        local_NL = self._part.local(fragment)
        found = self._ranks.collect({"do": "values", "fragment": fragment}, self._sizes(fragment)[1:])
        return self._part.whole(fragment, [self._part.rows(local_NL), *found])

    def _assembled(self, p: int, parts: Sequence[Tensor]) -> Tensor:
        return self._part.whole(p, parts)

    def _sizes(self, p: int) -> list[int]:
        return self._part.numels(p)
