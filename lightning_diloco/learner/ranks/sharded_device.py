"""One rank's device if each rank holds a part of the parameters. Ranks encode each contribution together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.core.quantize import decode, encode_fragment
from lightning_diloco.devices.base import Encoded
from lightning_diloco.devices.part import PartPlan, assemble
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.learner.ranks.reshard import Resharder
from lightning_diloco.protocol.codec import Json


class ShardedDevice(ReplicatedDevice):
    """A `FragmentDevice` for the whole learner, in front of `PartFragments`; see `ReplicatedDevice` for the arguments.

    Rank 0 collects the parts of all ranks and assembles them. Ranks encode one fragment at a time.
    """

    _own: Any
    _are_equal = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._plans = self._plans_of(options["boxes"])
        self._resharder = Resharder(self._ranks, self._plans, self._config)
        self.local_values, self.anchor = self._local_values, self._anchor

    def _plans_of(self, boxes: Sequence[Mapping[str, Any]]) -> list[PartPlan]:
        return [PartPlan(self._plan, each, self._config.block_size) for each in boxes]

    # --- rank 0 --------------------------------------------------------------------------------------------------

    def encode(self, snapshot: Any) -> Encoded:
        """See `FragmentDevice.encode`. If the ranks cannot upload, rank 0 assembles the parts and encodes alone."""
        boundary, own = snapshot
        p = own.fragment
        if self.deals:
            delta_L, command = self._own.delta(own), {"do": "deal", "fragment": p, "boundary": boundary}
            encoded = self._ranks.together(command, partial(self._resharder.whole, p, delta_L))
            self.dealt.add(p)
            return encoded
        wanted_P = self._whole(p, self._own.delta(own), {"do": "delta", "fragment": p, "boundary": boundary})
        wire, block_size = self._config.wire, self._config.block_size
        payload = encode_fragment(self._plans[0].wholes[p], wanted_P, wire, block_size)
        norm = float(torch.linalg.vector_norm(wanted_P))
        wanted_P.sub_(decode(payload, numel=wanted_P.numel(), wire=wire, block_size=block_size))
        lost = float(torch.linalg.vector_norm(wanted_P))
        return Encoded(payload, norm, lost / norm if norm else 0.0)

    def counted_anchor(self, fragment: int) -> Tensor | None:
        """See `ReplicatedDevice.counted_anchor`. The result is invalid if the fragment lands here during the call."""
        own, sizes = self._own_anchor(fragment), [1 + size for size in self._sizes(fragment)]
        found = [own, *self._ranks.collect({"do": "anchor", "fragment": fragment}, sizes[1:])]
        if any(float(each[0]) != float(own[0]) for each in found):
            return None
        return self._assembled(fragment, [each[1:] for each in found])

    def _local_values(self, fragment: int) -> Tensor:
        command = {"do": "values", "fragment": fragment}
        return self._whole(fragment, self._own.local_values(fragment), command)

    def _anchor(self, fragment: int) -> Tensor:
        """Return the whole anchor. Call this only while no fragment lands on any rank."""
        whole_P = self.counted_anchor(fragment)
        assert whole_P is not None, "ranks differ in what has landed"
        return whole_P

    def _whole(self, p: int, own_L: Tensor, command: Mapping[str, Any]) -> Tensor:
        return self._assembled(p, [own_L, *self._ranks.collect(command, self._sizes(p)[1:])])

    def _assembled(self, p: int, parts: Sequence[Tensor]) -> Tensor:
        return assemble(self._plans, p, parts)

    def _sizes(self, p: int) -> list[int]:
        return [plan.layout(p, self._config.block_size).numel for plan in self._plans]

    # --- any rank ------------------------------------------------------------------------------------------------

    def follow(self, command: Json, payload: Tensor) -> Any:
        """See `ReplicatedDevice.follow`."""
        p = command["fragment"]
        match command["do"]:
            case "values":
                return partial(self._ranks.deliver, self._own.local_values(p))
            case "anchor":
                return partial(self._ranks.deliver, self._own_anchor(p))
            case "delta":
                return partial(self._ranks.deliver, self._own.delta(self._snapshot(p, command["boundary"])))
            case "deal":
                return partial(self._deal, p, self._own.delta(self._snapshot(p, command["boundary"])))
        return super().follow(command, payload)

    def _own_anchor(self, p: int) -> Tensor:
        """Return how often a fragment has landed, followed by this rank's part of the anchor; float32 (1 + L,).

        If the fragment lands meanwhile, the anchor is read again, as in `Member._mark`.
        """
        while True:
            before = self._count(p)
            anchor_L = self._own.anchor(p)
            if self._count(p) == before:
                return torch.cat((torch.tensor([before], dtype=torch.float32), anchor_L))

    def _count(self, p: int) -> int:
        with self._landing:
            return self._counts[p]

    def _deal(self, p: int, delta_L: Tensor) -> None:
        """Encode a fragment together with all other ranks, and keep the range that this rank has encoded."""
        assert self._sender is not None
        self._sender.keep_part(p, self._resharder.bare(self._resharder.part(p, delta_L)))
