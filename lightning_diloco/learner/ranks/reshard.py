"""Encoding of a contribution by ranks that each hold a part of the parameters.

1. Each rank computes its part of the pseudo-gradient. The ranks then reshard it (`devices/deal.py`): each rank receives
   a range of whole quantization blocks, and encodes it. So float32 values cross between ranks only once, and no rank
   holds all of them.
2. The other ranks send their encoded ranges to rank 0. With int8 these have a quarter of the float32 bytes. Rank 0
   keeps the whole contribution. It needs it when the contribution has been merged, and if another rank cannot upload.
3. A part with NaN or Inf is resharded like any other. Rank 0 finds it in the whole contribution, and names the
   parameters.
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

_NORMS_BYTES = 16  # two squared norms, float64


class Resharder:
    """One rank's part in the resharding.

    Args:
        ranks: the ranks of this learner.
        plans: part plan of each rank.
        config: options of the run.
    """

    def __init__(self, ranks: Ranks, plans: Sequence[PartPlan], config: RunConfig) -> None:
        self._ranks, self._plans, self._config = ranks, plans, config

    def part(self, p: int, delta_L: Tensor) -> Tensor:
        """Encode this rank's range of a fragment, and send it to rank 0. All ranks call this at the same time.

        Args:
            p: index of the fragment.
            delta_L: this rank's part of the pseudo-gradient, float32 (L,).

        Returns:
            The encoded range, followed by the squared norms of its values and of its encoding error; uint8.
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
        """Call `part` on rank 0, and return the whole contribution.

        Raises:
            NonFiniteError: the pseudo-gradient holds NaN or Inf; the error names the parameters.
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
        """Return the encoded range without its norms."""
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
        except CorruptMessageError:  # not finite; rank 0 names the parameters
            wanted_R.fill_(torch.nan)
        norms = torch.stack((norm, torch.linalg.vector_norm(wanted_R))).double()
        return torch.cat((part, norms.square().view(torch.uint8)))

    def _ranges(self, p: int) -> list[tuple[int, int]]:
        n, numel = len(self._plans), self._plans[0].wholes[p].padded_numel
        return [part_range(k, n, numel, self._config.block_size) for k in range(n)]

    def _nbytes(self, start: int, stop: int) -> int:
        return wire_nbytes(stop - start, self._config.wire, self._config.block_size)
