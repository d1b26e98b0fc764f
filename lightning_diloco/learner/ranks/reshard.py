"""How ranks that each hold a part of the parameters encode a contribution together.

1. Each rank measures its part of the pseudo-gradient. Then they deal it out anew (`devices/deal.py`): each has a range
   of whole quantization blocks, and encodes it. So float32 crosses between ranks once, and no rank holds all of it.
2. Encoded parts go to rank 0, a quarter of that as int8: it keeps all of what was sent, which it needs when the
   contribution comes back merged, and when another rank cannot upload.
3. A part with NaN or Inf is dealt like any other; rank 0 finds it in the whole, and names the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.blocks import chunk_numel
from lightning_diloco.core.parts import joined, part_range
from lightning_diloco.core.quantize import Decoder, check_fragment, encode_unchecked, wire_nbytes
from lightning_diloco.devices.base import Encoded
from lightning_diloco.devices.deal import dealt, gathered, num_dealt
from lightning_diloco.devices.part import PartPlan
from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.learner.ranks.group import Ranks

_NORMS_BYTES = 16  # two squares, float64


class Resharder:
    """One rank's hand in it.

    Args:
        ranks: of this learner.
        plans: of each rank.
        config: of the run.
    """

    def __init__(self, ranks: Ranks, plans: Sequence[PartPlan], config: RunConfig) -> None:
        self._ranks, self._plans, self._config = ranks, plans, config

    def part(self, p: int, delta_L: Tensor) -> Tensor:
        """Encode this rank's range of a fragment, and send it to rank 0; all ranks at once.

        Args:
            p: which fragment.
            delta_L: this rank's part of the pseudo-gradient, float32 (L,).

        Returns:
            Encoded range, and what its norms are; uint8.
        """
        mine, ranges = self._ranks.rank, self._ranges(p)
        part = self._encoded(self._swapped(p, delta_L, ranges))
        if mine:
            none = torch.empty(0, dtype=torch.uint8)
            self._ranks.swap([part, *[none] * (len(ranges) - 1)], [none] * len(ranges))
        return part

    def _swapped(self, p: int, delta_L: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
        mine = self._ranks.rank
        outgoing = [dealt(self._plans[mine], p, delta_L, *each) for each in ranges]
        incoming = [torch.empty(num_dealt(plan, p, *ranges[mine])) for plan in self._plans]
        incoming[mine] = outgoing[mine]
        self._ranks.swap(outgoing, incoming)
        del outgoing
        return gathered(self._plans, p, incoming, *ranges[mine])

    def whole(self, p: int, delta_L: Tensor) -> Encoded:
        """`part` of rank 0, and then the whole contribution.

        Raises:
            NonFiniteError: naming the parameters.
        """
        own = self.part(p, delta_L)
        sizes = [self._nbytes(*each) + _NORMS_BYTES for each in self._ranges(p)]
        found = [own, *(torch.empty(size, dtype=torch.uint8) for size in sizes[1:])]
        self._ranks.swap([own[:0]] * len(found), found)
        norms = torch.stack([each[-_NORMS_BYTES:].clone().view(torch.float64) for each in found]).sum(0).sqrt()
        layout, config = self._plans[0].wholes[p], self._config
        bare = [each[:-_NORMS_BYTES] for each in found]
        payload = joined(bare, numel=layout.padded_numel, wire=config.wire, block_size=config.block_size)
        check_fragment(layout, payload, config.wire, config.block_size)
        norm, lost = norms.tolist()
        return Encoded(payload, norm, lost / norm if norm else 0.0)

    @staticmethod
    def bare(part: Tensor) -> Tensor:
        """The encoded range alone."""
        return part[:-_NORMS_BYTES].clone()

    def _encoded(self, wanted_R: Tensor) -> Tensor:
        wire, size = self._config.wire, self._config.block_size
        part = encode_unchecked(wanted_R, wire=wire, block_size=size)
        norm = torch.linalg.vector_norm(wanted_R)
        try:
            decoder = Decoder(part, wanted_R.numel(), wire, size)
            for values in wanted_R.split(chunk_numel(wanted_R, size)):
                start = values.storage_offset() - wanted_R.storage_offset()
                values.sub_(decoder.read(start, torch.empty_like(values)))
        except CorruptMessageError:  # not finite; rank 0 says where
            wanted_R.fill_(torch.nan)
        norms = torch.stack((norm, torch.linalg.vector_norm(wanted_R))).double()
        return torch.cat((part, norms.square().view(torch.uint8)))

    def _ranges(self, p: int) -> list[tuple[int, int]]:
        n, numel = len(self._plans), self._plans[0].wholes[p].padded_numel
        return [part_range(k, n, numel, self._config.block_size) for k in range(n)]

    def _nbytes(self, start: int, stop: int) -> int:
        return wire_nbytes(stop - start, self._config.wire, self._config.block_size)
