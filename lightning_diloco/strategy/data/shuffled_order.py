"""The order in which an epoch of a data set of known length is read, and the ranges of this order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lightning_diloco.protocol.data_ranges import Lease


class ShuffledOrder:
    """Every epoch has its own order, equal on all learners.

    Args:
        draw: draws an order with this generator, int64 (length,); another thread than the training thread calls it.
        length: number of samples in an epoch.
        range_size: samples per range.
        seed: equal on all learners.
    """

    def __init__(self, draw: Callable[[torch.Generator], Tensor], length: int, *, range_size: int, seed: int) -> None:
        self._draw, self._range_size, self._seed = draw, range_size, seed
        self._order = lru_cache(maxsize=2)(self._of_epoch)
        self.num_ranges = -(-length // range_size)

    def indices(self, lease: Lease) -> Tensor:
        """Return the indices of the samples of a lease, int64 (n,)."""
        first = lease.index * self._range_size
        return self._order(lease.epoch)[first + lease.skip : first + self._range_size]

    def _of_epoch(self, epoch: int) -> Tensor:
        return self._draw(torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63))
