"""One script, several learners, different data.

1. A learner reads every `parts`-th sample of an order that all learners of a run draw alike, from its own start. What
   does not divide evenly is left out of that epoch: nothing is read twice. A process that goes on where another one
   ended begins in the midst of that order.
2. The order is the user's: it is drawn from the sampler of the loader, whatever it is. Where the user wrote what makes
   batches (`batch_sampler=`), whole batches are shared out, every `parts`-th to each.
3. Seeds follow from the run, so that all learners agree. Each loader has an order of its own, as if they drew one after
   another from the global generator; loaders whose own generators are seeded alike stay in step.
4. Loaders split by their owner, or by Lightning over ranks (a DistributedSampler), stay so; they go on likewise.
5. What cannot be split is read in full by everybody, and a warning says so. Its order still differs if it is drawn
   from torch's, numpy's or Python's global generator: `fork_random_state` gives every learner its own.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator
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

Position = tuple[int, int]  # epoch, and batches of it that were read before
START: Position = (0, 0)

_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class PartSampler(Sampler[Any]):
    """One learner's part of another sampler's order.

    Unlike torch's DistributedSampler it keeps whatever order the wrapped sampler draws, weighted or random ones too,
    and repeats no sample to fill up the last round.

    Args:
        sampler: of samples or of batches, with a length; drawn from the global generators, or from its own `generator`.
        part: which part, 0..parts-1.
        parts: number of parts.
        seed: equal on all learners that share the data.
        epoch, skip: where reading begins: the epoch, and what was read of this part of it before.
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
            order = list(self.whole)
        began, skip = self.began
        return iter(order[self._part : len(self) * self._parts : self._parts][skip * (self._epoch == began) :])

    def __len__(self) -> int:
        return len(self.whole) // self._parts  # type: ignore[arg-type]


def split(loader: object, part: int, parts: int, begins: Position = START, *, seed: int = 0) -> object:
    """This learner's part of a training loader, or the loader itself with a warning.

    Args:
        loader: what the user gave to the Trainer; its class, order, batch size, workers and the rest are kept.
        part: which part, 0..parts-1.
        parts: number of parts.
        begins: where reading begins.
        seed: of the order; see `order_seed`.
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
    return _with_sampler(loader, PartSampler(sampler, part, parts, seed, **_beginning(loader, begins)))


def in_own_order(loader: object, begins: Position = START, *, seed: int = 0, readers: int = 1) -> object:
    """All of the training data, in an order that is this learner's at every start: a later process finds its place.

    Only where torch's own samplers choose the order; what a user wrote is drawn as ever.

    Args:
        loader: what the user gave to the Trainer.
        begins: where reading begins.
        seed: of this learner's order; see `order_seed`.
        readers: processes of this learner among which Lightning has divided it.
    """
    if not isinstance(loader, DataLoader) or has_iterable_dataset(loader) or not _draws_samples(loader):
        return loader
    sampler = _order_of(loader)
    if type(sampler) is DistributedSampler and 1 < readers == sampler.num_replicas:
        sampler = copy.copy(sampler)
        sampler.seed = seed
        loader = _with_sampler(loader, sampler)
    if _is_distributed(sampler):
        return _going_on(loader, begins)
    if type(sampler) not in _OF_TORCH:
        return loader
    return _with_sampler(loader, PartSampler(sampler, 0, 1, seed, **_beginning(loader, begins)))


def is_at(loader: object, begins: Position) -> bool:
    """Whether reading begins there."""
    return begins == START or (
        isinstance(loader, DataLoader)
        and isinstance(loader.sampler, PartSampler)
        and loader.sampler.began == (begins[0], begins[1] * _batch_size(loader))
    )


def order_seed(run_seed: int, *which: int) -> int:
    """Seed of an order.

    Args:
        run_seed: the same for all learners of a run.
        which: which of the orders that this run needs.
    """
    return _seed_of("order", str(run_seed), *map(str, which)) % 2**31


def order_number(loader: object, earlier: list[torch.Generator | None]) -> int:
    """Which order a loader is read in: one of its own, or that of an earlier one that is meant to be in step with it.

    Args:
        loader: one of the training loaders.
        earlier: own generators of those before it; this one's is added.
    """
    own = getattr(_order_of(loader), "generator", None) if isinstance(loader, DataLoader) else None
    earlier.append(own)
    for number, other in enumerate(earlier[:-1]):
        if own is not None and other is not None and own is not other and own.initial_seed() == other.initial_seed():
            return number
    return len(earlier) - 1


def fork_random_state(learner_id: str, incarnation: int = 1) -> None:
    """Give this learner random numbers of its own, although the script seeds all learners alike.

    Args:
        learner_id: the fork is a function of this and of torch's present seed.
        incarnation: and of this: a process does not draw once more what the one before it drew.
    """
    _seed_all(_seed_of(str(torch.initial_seed()), learner_id, *([] if incarnation == 1 else [str(incarnation)])))


def _going_on(loader: DataLoader[object], begins: Position) -> DataLoader[object]:
    """A loader that was split already, from where reading begins."""
    if begins == START or not _draws_samples(loader):
        return loader
    return _with_sampler(loader, PartSampler(_order_of(loader), 0, 1, 0, **_beginning(loader, begins)))


def _seed_of(*words: str) -> int:
    digest = hashlib.sha256("/".join(words).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _draws_samples(loader: DataLoader[object]) -> bool:
    """Whether torch makes the batches of it, rather than something the user wrote."""
    return loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler


def _order_of(loader: DataLoader[object]) -> Any:
    """What the user chose to draw the order by: a sampler, or what makes batches; no part of it."""
    batches = loader.batch_sampler
    found = batches.sampler if type(batches) is BatchSampler else loader.sampler if batches is None else batches
    while isinstance(found, PartSampler):  # of another fit, or from before the part was known
        found = found.whole
    return found


def _is_distributed(sampler: object) -> bool:
    return any(isinstance(layer, DistributedSampler) for layer in _layers(sampler))


def _layers(sampler: object) -> Iterator[Any]:
    """A sampler, and those it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _beginning(loader: DataLoader[object], begins: Position) -> dict[str, int]:
    """As `PartSampler` counts. Loaders that keep their own position begin with the epoch."""
    is_own = hasattr(loader, "load_state_dict")
    return {"epoch": begins[0], "skip": 0 if is_own else begins[1] * _batch_size(loader)}


def _batch_size(loader: DataLoader[object]) -> int:
    """How much its sampler gives for a batch."""
    batches = loader.batch_sampler
    return batches.batch_size if type(batches) is BatchSampler else 1


def _with_sampler(loader: DataLoader[object], sampler: Sampler[Any]) -> DataLoader[object]:
    """A copy of the loader that draws from this sampler; made without its constructor, it keeps all it has."""
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    elif batches is not None:
        batches = sampler
    copied = copy.copy(loader)
    for name, value in {"sampler": sampler, "batch_sampler": batches, "_iterator": None}.items():
        object.__setattr__(copied, name, value)  # torch refuses: a loader that is iterated would not notice
    return copied


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _unsplit(loader: object, reason: str) -> object:
    rank_zero_warn(
        f"The training data cannot be split over learners: {reason}. Every learner reads all of it, in an order of its "
        "own only if that is drawn from a global random generator. A map-style dataset in a DataLoader is split; "
        "otherwise split by trainer.strategy.data_part == (part, parts)."
    )
    return loader
