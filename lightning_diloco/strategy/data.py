"""One script, several learners, different data.

1. A learner reads every `parts`-th sample of the order that all learners draw alike, from its own start. What does
   not divide evenly is left out of that epoch: nothing is read twice. A process that goes on where another one ended
   begins in the midst of that order.
2. Loaders split by their owner, or by Lightning over ranks (a DistributedSampler), stay so; they go on likewise.
3. What cannot be split is read in full by everybody, and a warning says so. Its order still differs if it is drawn
   from torch's, numpy's or Python's global generator: `fork_random_state` gives every learner its own.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, has_iterable_dataset
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

Position = tuple[int, int]  # epoch, and batches of it that were read before
START: Position = (0, 0)


class PartSampler(Sampler[int]):
    """One learner's part of another sampler's order.

    Unlike torch's DistributedSampler it keeps whatever order the wrapped sampler draws, weighted or random ones too,
    and repeats no sample to fill up the last round.

    Args:
        sampler: any sampler with a length; drawn from the global generators, or from its own `generator`.
        part: which part, 0..parts-1.
        parts: number of parts.
        seed: equal on all learners that share the data.
        epoch, skip: where reading begins: the epoch, and samples of this part of it that were read before.
    """

    def __init__(
        self, sampler: Sampler[int], part: int, parts: int, seed: int, *, epoch: int = 0, skip: int = 0
    ) -> None:
        self._sampler, self._part, self._parts, self._seed = sampler, part, parts, seed
        self._epoch, self.began = epoch, (epoch, skip)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; Lightning calls this before every epoch."""
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        with isolate_rng():
            _seed_all(self._seed + self._epoch)
            if isinstance(own := getattr(self._sampler, "generator", None), torch.Generator):
                own.manual_seed(self._seed + self._epoch)
            order = list(self._sampler)
        began, skip = self.began
        return iter(order[self._part : len(self) * self._parts : self._parts][skip * (self._epoch == began) :])

    def __len__(self) -> int:
        return len(self._sampler) // self._parts  # type: ignore[arg-type]


def split(loader: object, part: int, parts: int, begins: Position = START) -> object:
    """This learner's part of a training loader, or the loader itself with a warning.

    Args:
        loader: what the user gave to the Trainer; shuffling, batch size, workers and the rest are kept.
        part: which part, 0..parts-1.
        parts: number of parts.
        begins: where reading begins.
    """
    if not isinstance(loader, DataLoader):
        return _unsplit(loader, f"a {type(loader).__name__} is no torch DataLoader")
    if has_iterable_dataset(loader):
        return _unsplit(loader, f"{type(loader.dataset).__name__} is an iterable dataset")
    sampler = getattr(loader.batch_sampler, "sampler", None) if loader.batch_sampler else loader.sampler
    if isinstance(sampler, (DistributedSampler, PartSampler)):
        return _going_on(loader, begins)
    if not hasattr(sampler, "__len__"):
        return _unsplit(loader, f"{type(loader.batch_sampler or sampler).__name__} has no sampler with a length")
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # as Lightning seeds its DistributedSampler
    try:
        found = _with_sampler(loader, PartSampler(sampler, part, parts, seed, **_beginning(loader, begins)))
    except (TypeError, MisconfigurationException) as error:
        return _unsplit(loader, str(error).strip())
    rank_zero_info(
        f"The training data are split in {parts} fixed parts; this learner reads part {part}. A part whose learner "
        "leaves is read by nobody; lightning_diloco.hf.TextData leases its data instead, to whoever is there."
    )
    return found


def in_own_order(loader: object, learner_id: str, begins: Position = START) -> object:
    """All of the training data, in an order that is this learner's at every start: a later process finds its place.

    Only where torch itself chose the order (`shuffle=`); what a user ordered stays as it is.
    """
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return loader
    if isinstance(loader.sampler, DistributedSampler):
        return _going_on(loader, begins)
    if type(loader.sampler) not in (SequentialSampler, RandomSampler):
        return loader
    seed = _seed_of("order", learner_id) % 2**31
    return _with_sampler(loader, PartSampler(loader.sampler, 0, 1, seed, **_beginning(loader, begins)))


def is_at(loader: object, begins: Position) -> bool:
    """Whether reading begins there."""
    return begins == START or (
        isinstance(loader, DataLoader)
        and isinstance(loader.sampler, PartSampler)
        and loader.sampler.began == (begins[0], begins[1] * (_batch_size(loader) or 0))
    )


def fork_random_state(learner_id: str, incarnation: int = 1) -> None:
    """Give this learner random numbers of its own, although the script seeds all learners alike.

    Args:
        learner_id: the fork is a function of this and of torch's present seed.
        incarnation: and of this: a process does not draw once more what the one before it drew.
    """
    _seed_all(_seed_of(str(torch.initial_seed()), learner_id, *([] if incarnation == 1 else [str(incarnation)])))


def _going_on(loader: DataLoader[object], begins: Position) -> DataLoader[object]:
    """A loader that was split already, from where reading begins."""
    if begins == START or type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return loader
    if isinstance(sampler := loader.sampler, PartSampler):
        return loader
    return _with_sampler(loader, PartSampler(sampler, 0, 1, 0, **_beginning(loader, begins)))


def _seed_of(*words: str) -> int:
    digest = hashlib.sha256("/".join(words).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _beginning(loader: DataLoader[object], begins: Position) -> dict[str, int]:
    """In samples. Loaders that keep their own position, and batches of unknown size, begin with the epoch."""
    is_own = hasattr(loader, "load_state_dict")
    return {"epoch": begins[0], "skip": 0 if is_own else begins[1] * (_batch_size(loader) or 0)}


def _batch_size(loader: DataLoader[object]) -> int | None:
    batches = loader.batch_sampler
    return batches.batch_size if type(batches) is BatchSampler else None


def _with_sampler(loader: DataLoader[object], sampler: Sampler[int]) -> DataLoader[object]:
    """The same loader with another sampler, made by Lightning's own means, which know custom loader classes."""
    args, kwargs = _get_dataloader_init_args_and_kwargs(loader, sampler, RunningStage.TRAINING)
    old = loader.batch_sampler
    if loader.batch_size is None and isinstance(old, BatchSampler) and kwargs.get("batch_sampler") is None:
        # Lightning forgets the batch size of a plain BatchSampler that was passed to the loader.
        kwargs.update(batch_size=old.batch_size, drop_last=old.drop_last)
    return _reinstantiate_wrapped_cls(loader, *args, **kwargs)


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
