"""The device of rank 0 where each rank holds a part: they encode contributions together, one fragment at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import decode, encode_fragment
from lightning_diloco.devices.base import Encoded
from lightning_diloco.devices.part import Box, PartFragments, PartPlan, assemble
from lightning_diloco.learner.ranks.group import Ranks
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice
from lightning_diloco.learner.ranks.reshard import Resharder


class ShardedDevice(ReplicatedDevice):
    """A `FragmentDevice` for the whole learner.

    Args:
        own: this rank's part.
        ranks: of this learner.
        plan: of the run.
        config: of the run.
        boxes: of each rank.
    """

    def __init__(
        self,
        own: PartFragments,
        ranks: Ranks,
        *,
        plan: FragmentPlan,
        config: RunConfig,
        boxes: Sequence[Mapping[str, Box]],
    ) -> None:
        super().__init__(own, ranks)
        self._part, self._config = own, config
        self._plans = [PartPlan(plan, each, config.block_size) for each in boxes]
        self._dealer = Resharder(ranks, self._plans, config)
        self.local_values, self.anchor, self.digest = self._local_values, self._anchor, self._digest

    def snapshot(self, fragment: int) -> Any:
        """See `FragmentDevice.snapshot`; each rank has values of its own, which need not be settled yet."""
        return self._ranks.num_begun, self._part.snapshot(fragment)

    def encode(self, snapshot: Any) -> Encoded:
        """See `FragmentDevice.encode`; where ranks cannot upload, this one puts the parts together and encodes."""
        boundary, own = snapshot
        p = own.fragment
        if self.deals:
            delta_L, command = self._part.delta(own), {"do": "deal", "fragment": p, "boundary": boundary}
            encoded = self._ranks.together(command, partial(self._dealer.whole, p, delta_L))
            self.dealt.add(p)
            return encoded
        wanted_P = self._whole(p, self._part.delta(own), {"do": "delta", "fragment": p, "boundary": boundary})
        wire, block_size = self._config.wire, self._config.block_size
        payload = encode_fragment(self._plans[0].wholes[p], wanted_P, wire, block_size)
        norm = float(torch.linalg.vector_norm(wanted_P))
        wanted_P.sub_(decode(payload, numel=wanted_P.numel(), wire=wire, block_size=block_size))
        lost = float(torch.linalg.vector_norm(wanted_P))
        return Encoded(payload, norm, lost / norm if norm else 0.0)

    def _local_values(self, fragment: int) -> Tensor:
        command = {"do": "values", "fragment": fragment}
        return self._whole(fragment, self._part.local_values(fragment), command)

    def own_anchor(self, fragment: int) -> Tensor:
        """How often it has landed, then this rank's part of the anchor; of no use if it lands here meanwhile."""
        return torch.cat((torch.tensor([self.counts[fragment]], dtype=torch.float32), self._part.anchor(fragment)))

    def completed(self, fragment: int, own: Tensor) -> Tensor | None:
        """The whole anchor that `own_anchor` is part of; None if it has landed somewhere else since, or not yet."""
        sizes = [1 + size for size in self._sizes(fragment)]
        found = [own, *self._ranks.collect({"do": "anchor", "fragment": fragment}, sizes[1:])]
        if any(float(each[0]) != float(own[0]) for each in found):
            return None
        return self._assembled(fragment, [each[1:] for each in found])

    def _anchor(self, fragment: int) -> Tensor:
        """While nothing lands anywhere."""
        whole_P = self.completed(fragment, self.own_anchor(fragment))
        assert whole_P is not None, "ranks differ in what has landed"
        return whole_P

    def _digest(self, fragment: int) -> str:
        return digest(self._anchor(fragment))

    def _whole(self, p: int, own_L: Tensor, command: Mapping[str, Any]) -> Tensor:
        return self._assembled(p, [own_L, *self._ranks.collect(command, self._sizes(p)[1:])])

    def _assembled(self, p: int, parts: Sequence[Tensor]) -> Tensor:
        return assemble(self._plans, p, parts)

    def _sizes(self, p: int) -> list[int]:
        return [plan.layout(p, self._config.block_size).numel for plan in self._plans]
