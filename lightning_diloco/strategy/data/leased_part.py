"""Leases the samples of a user's loader, instead of splitting them into fixed parts.

1. A loader can be leased if torch shuffles its data set and makes its batches, and if the data set is large enough for
   leases to arrive in time. In each epoch of the data, all learners draw the same order, and ranges of it are leased.
   The whole order is in memory, so the samples of a draw are at most MAX_SAMPLES.
2. An epoch of the loader is as long as a fixed part. A fast learner reads more ranges than a slow one. Others read the
   ranges of a learner that leaves.
3. Whether a loader is leased is decided at the first iteration, because Lightning processes several loaders one after
   another. If there are several, samples that have the same place in each may belong together, so all of them are
   split.

Source: our choice.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_diloco.protocol.data_ranges import Catalogue, Lease
from lightning_diloco.strategy.data.shuffled_order import ShuffledOrder
from lightning_diloco.strategy.data.split import PartSampler, with_sampler

NUM_RANGES, MAX_RANGE = 256, 1024
MIN_SAMPLES, MAX_SAMPLES = 4096, 1 << 26  # 3.3 GB while an order is drawn, and 0.5 GB for each of two orders
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class LeasedPart(PartSampler):
    """A sampler for one learner that reads leased samples, or its fixed part.

    Args:
        part: the fixed part.
        lease: called at the first iteration; returns batches of indices, or None for the fixed part.
    """

    def __init__(self, part: PartSampler, lease: Callable[[], Iterable[list[int]] | None]) -> None:
        vars(self).update(vars(part))
        self._lease: Callable[[], Iterable[list[int]] | None] | None = lease
        self._batches: Iterable[list[int]] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._lease is not None:
            self._batches, self._lease = self._lease(), None
        return super().__iter__() if self._batches is None else itertools.chain.from_iterable(self._batches)


class ShuffledRanges:
    """Ranges of the order in which one of torch's samplers draws samples.

    Args:
        sampler: draws at random, and takes a `generator`.
        seed: equal on all learners.
    """

    def __init__(self, sampler: Sampler[int], seed: int) -> None:
        self._sampler = sampler
        length = len(sampler)  # type: ignore[arg-type]
        size = min(MAX_RANGE, max(1, length // NUM_RANGES))
        self._order = ShuffledOrder(self._draw, length, range_size=size, seed=seed)
        digest = f"{type(sampler).__name__} of {length} samples in order {seed}, ranges of {size}"
        self.catalogue = Catalogue(digest, 1, self._order.num_ranges)

    def read(self, lease: Lease) -> tuple[Tensor, bool]:
        """Return the indices of a lease, int64 (n,), and False because the number of ranges is known."""
        return self._order.indices(lease), False

    def _draw(self, generator: torch.Generator) -> Tensor:
        sampler: Any = copy.copy(self._sampler)
        sampler.generator = generator
        # Not up to the iterator's end, because torch then makes a second permutation.
        return torch.tensor(list(itertools.islice(sampler, len(sampler))), dtype=torch.int64)


def can_be_leased(loader: object) -> bool:
    """Return whether rule 1 holds for a loader that is split into parts."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return False
    part = loader.sampler
    keeps_order = getattr(loader, "in_order", True) and not hasattr(loader, "load_state_dict")
    return (
        keeps_order
        and isinstance(part, PartSampler)
        and type(part.whole) in _SHUFFLING
        and MIN_SAMPLES <= len(part.whole) <= MAX_SAMPLES  # type: ignore[arg-type]
    )


def lease_instead(
    loader: DataLoader[object], lease: Callable[[DataLoader[object]], Iterable[list[int]] | None]
) -> DataLoader[object]:
    """Return a copy of a split loader that reads leased samples if `lease` returns batches of them for this loader."""
    part = loader.sampler
    assert isinstance(part, PartSampler)
    return with_sampler(loader, LeasedPart(part, lambda: lease(loader)))
