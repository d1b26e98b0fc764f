"""Ranges of a known number of packed sequences; every epoch has its own order, equal on all learners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_diloco.protocol.data_ranges import Catalogue, Lease
from lightning_diloco.strategy.data.shuffled_order import ShuffledOrder

if TYPE_CHECKING:
    from datasets import Dataset

RANGE_SIZE = 128


class PackedRanges:
    """Ranges of packed sequences.

    Args:
        sequences: dataset with the column `input_ids`, in torch format.
        digest: identity of the sequences.
        seed: seed of the epochs' orders.
        range_size: sequences per range.
    """

    def __init__(self, sequences: Dataset, *, digest: str, seed: int, range_size: int = RANGE_SIZE) -> None:
        self._sequences = sequences
        self._order = ShuffledOrder(self._draw, len(sequences), range_size=range_size, seed=seed)
        self.catalogue = Catalogue(f"{digest}/{range_size}/{seed}", 1, self._order.num_ranges)

    def read(self, lease: Lease) -> tuple[Tensor, bool]:
        """Return the sequences of a lease, int64 (n, seq_len), and False because the number of ranges is known."""
        rows = self._order.indices(lease)
        if not len(rows):
            return torch.empty((0, len(self._sequences[0]["input_ids"])), dtype=torch.int64), False
        return self._sequences[rows.tolist()]["input_ids"], False

    def _draw(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(len(self._sequences), generator=generator)
