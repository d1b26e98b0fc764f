"""Splits training data over learners that run the same script.

1. All learners of a run draw the same order of samples; each reads every `parts`-th sample, from its own start. Samples
   that do not divide evenly are left out of the epoch, so that none is read twice. A process that continues the work of
   another one begins in the middle of the order.
2. The order comes from the loader's own sampler. If the user gave a `batch_sampler`, whole batches are split instead.
3. Seeds are derived from the run, so that all learners agree. Each loader has its own order, except that loaders whose
   own generators have equal seeds share one order.
4. A loader with a DistributedSampler, from the user or from Lightning, is not split again. It also continues in the
   middle of its order.
5. If a loader cannot be split, every learner reads all of it, and a warning says so. The order still differs if it is
   drawn from a global generator of torch, numpy or Python: `fork_random_state` gives every learner its own.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.data import has_iterable_dataset
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

Position = tuple[int, int]  # epoch, and number of its batches that were read before
START: Position = (0, 0)

_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class PartSampler(Sampler[Any]):
    """One learner's part of another sampler's order.

    Unlike torch's DistributedSampler, it keeps the order of the wrapped sampler, and repeats no sample to fill up the
    last round.

    Args:
        sampler: a sampler of samples or of batches that has a length; draws from the global generators or from its own
            `generator`.
        part: number of the part, 0..parts-1.
        parts: number of parts.
        seed: equal on all learners that share the data.
        epoch, skip: where reading begins: the epoch, and how many samples of this part were read before.
    """

    def __init__(
        self, sampler: Sampler[Any], part: int, parts: int, seed: int, *, epoch: int = 0, skip: int = 0
    ) -> None:
        self.whole = sampler
        self._part, self._parts, self._seed = part, parts, seed
        self._epoch, self.began = epoch, (epoch, skip)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; Lightning calls this before every epoch."""
        self._epoch = epoch
        for sampler in _layers(self.whole):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        with isolate_rng():
            _seed_all(self._seed + self._epoch)
            for sampler in _layers(self.whole):
                if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
                    own.manual_seed(self._seed + self._epoch)
            return iter(self._drawn())

    def _drawn(self) -> Iterable[Any]:
        """Return this part of the order, and store only as much of the order as the sampler needs."""
        length = len(self)
        began, skip = self.began
        skip = min(skip, length) * (self._epoch == began)
        first = self._part + skip * self._parts
        if type(self.whole) is SequentialSampler:
            return range(length * self._parts)[first :: self._parts]
        if type(self.whole) is RandomSampler and self.whole.replacement and self.whole.generator is None:
            drawn = iter(self.whole)
            start = list(islice(drawn, 1))  # the sampler takes its seed now and draws the rest later
            return islice(chain(start, drawn), first, length * self._parts, self._parts)
        part = list(islice(self.whole, first, None, self._parts))  # to the end, as a sampler may expect
        del part[length - skip :]
        return part

    def __len__(self) -> int:
        return len(self.whole) // self._parts  # type: ignore[arg-type]


def split(loader: object, part: int, parts: int, begins: Position = START, *, seed: int = 0) -> object:
    """Return this learner's part of a training loader, or the loader itself with a warning.

    Args:
        loader: the user's loader; its class, order, batch size, workers and other attributes are kept.
        part: number of the part, 0..parts-1.
        parts: number of parts.
        begins: where reading begins.
        seed: seed of the order; see `order_seed`.
    """
    if not isinstance(loader, DataLoader):
        return _unsplit(loader, f"a {type(loader).__name__} is no torch DataLoader")
    if has_iterable_dataset(loader):
        return _unsplit(loader, f"{type(loader.dataset).__name__} is an iterable dataset")
    sampler = _order_of(loader)
    if _is_distributed(sampler):
        return _going_on(loader, begins)
    if not hasattr(sampler, "__len__"):
        return _unsplit(loader, f"{type(sampler).__name__} has no length")
    if len(sampler) < parts:
        unit = "samples" if _draws_samples(loader) else "batches"
        return _unsplit(loader, f"{len(sampler)} {unit} are fewer than the {parts} parts")
    return with_sampler(loader, PartSampler(sampler, part, parts, seed, **_beginning(loader, begins)))


def in_own_order(loader: object, begins: Position = START, *, seed: int = 0, readers: int = 1) -> object:
    """Return all of the training data in this learner's order, in which a later process finds its place.

    Only a loader with one of torch's own samplers is changed.

    Args:
        loader: the user's loader.
        begins: where reading begins.
        seed: seed of this learner's order; see `order_seed`.
        readers: number of processes of this learner among which Lightning has split the loader.
    """
    if not isinstance(loader, DataLoader) or has_iterable_dataset(loader) or not _draws_samples(loader):
        return loader
    sampler = _order_of(loader)
    if type(sampler) is DistributedSampler and 1 < readers == sampler.num_replicas:
        sampler = copy.copy(sampler)
        sampler.seed = seed
        loader = with_sampler(loader, sampler)
    if _is_distributed(sampler):
        return _going_on(loader, begins)
    if type(sampler) not in _OF_TORCH:
        return loader
    return with_sampler(loader, PartSampler(sampler, 0, 1, seed, **_beginning(loader, begins)))


def is_at(loader: object, begins: Position) -> bool:
    """Return whether a loader begins reading at `begins`."""
    return begins == START or (
        isinstance(loader, DataLoader)
        and isinstance(loader.sampler, PartSampler)
        and loader.sampler.began == (begins[0], begins[1] * _batch_size(loader))
    )


def order_seed(run_seed: int, *which: int) -> int:
    """Return the seed of an order.

    Args:
        run_seed: the same for all learners of a run.
        which: numbers of the order.
    """
    return _seed_of("order", str(run_seed), *map(str, which)) % 2**31


def order_number(loader: object, earlier: list[torch.Generator | None]) -> int:
    """Return the number of the order of a loader: its own, or that of an earlier loader with an equal seed.

    Args:
        loader: one of the training loaders.
        earlier: own generators of the loaders before it; this loader's is added.
    """
    own = getattr(_order_of(loader), "generator", None) if isinstance(loader, DataLoader) else None
    earlier.append(own)
    for number, other in enumerate(earlier[:-1]):
        if own is not None and other is not None and own is not other and own.initial_seed() == other.initial_seed():
            return number
    return len(earlier) - 1


def fork_random_state(learner_id: str, incarnation: int = 1) -> None:
    """Give this learner its own random numbers, although the script seeds all learners alike.

    The new state is a function of torch's present seed and of the arguments.

    Args:
        learner_id: id of this learner.
        incarnation: number of this process of the learner, so that it does not repeat the numbers of the one before.
    """
    _seed_all(_seed_of(str(torch.initial_seed()), learner_id, *([] if incarnation == 1 else [str(incarnation)])))


def _going_on(loader: DataLoader[object], begins: Position) -> DataLoader[object]:
    """Return a loader that was split already, from where reading begins."""
    if begins == START or not _draws_samples(loader):
        return loader
    return with_sampler(loader, PartSampler(_order_of(loader), 0, 1, 0, **_beginning(loader, begins)))


def _seed_of(*words: str) -> int:
    digest = hashlib.sha256("/".join(words).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _draws_samples(loader: DataLoader[object]) -> bool:
    """Return whether torch makes the batches, rather than the user's batch sampler."""
    return loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler


def _order_of(loader: DataLoader[object]) -> Any:
    """Return the user's sampler or batch sampler, without our parts of it."""
    batches = loader.batch_sampler
    found = batches.sampler if type(batches) is BatchSampler else loader.sampler if batches is None else batches
    while isinstance(found, PartSampler):  # made in another fit, or before the part was known
        found = found.whole
    return found


def _is_distributed(sampler: object) -> bool:
    return any(isinstance(layer, DistributedSampler) for layer in _layers(sampler))


def _layers(sampler: object) -> Iterator[Any]:
    """Yield a sampler and those that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _beginning(loader: DataLoader[object], begins: Position) -> dict[str, int]:
    """Return the arguments of `PartSampler`; loaders that keep their own position begin with the epoch."""
    is_own = hasattr(loader, "load_state_dict")
    return {"epoch": begins[0], "skip": 0 if is_own else begins[1] * _batch_size(loader)}


def _batch_size(loader: DataLoader[object]) -> int:
    """Return how many values of its sampler make a batch."""
    batches = loader.batch_sampler
    return batches.batch_size if type(batches) is BatchSampler else 1


def with_sampler(loader: DataLoader[object], sampler: Sampler[Any]) -> DataLoader[object]:
    """Return a copy of the loader with this sampler; the constructor is not called, so all other attributes stay."""
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    elif batches is not None:
        batches = sampler
    copied = copy.copy(loader)
    for name, value in {"sampler": sampler, "batch_sampler": batches, "_iterator": None}.items():
        object.__setattr__(copied, name, value)  # torch's own __setattr__ refuses this
    return copied


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _unsplit(loader: object, reason: str) -> object:
    rank_zero_warn(
        f"The training data cannot be split over learners: {reason}. Every learner reads all of it, in its own order "
        "only if the order is drawn from a global random generator. A map-style dataset in a DataLoader is split; "
        "otherwise, split the data by trainer.strategy.data_part == (part, parts)."
    )
    return loader
