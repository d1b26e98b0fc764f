"""One script, several learners, different data.

1. A learner reads every `parts`-th sample of the order that all learners draw alike, from its own start. What does
   not divide evenly is left out of that epoch: nothing is read twice.
2. Loaders split by their owner (a DistributedSampler) stay as they are.
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
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler


class PartSampler(Sampler[int]):
    """One learner's part of another sampler's order.

    Unlike torch's DistributedSampler it keeps whatever order the wrapped sampler draws, weighted or random ones too,
    and repeats no sample to fill up the last round.

    Args:
        sampler: any sampler with a length; drawn from the global generators, or from its own `generator`.
        part: which part, 0..parts-1.
        parts: number of parts.
        seed: equal on all learners.
    """

    def __init__(self, sampler: Sampler[int], part: int, parts: int, seed: int) -> None:
        self._sampler, self._part, self._parts, self._seed, self._epoch = sampler, part, parts, seed, 0

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
        return iter(order[self._part : len(self) * self._parts : self._parts])

    def __len__(self) -> int:
        return len(self._sampler) // self._parts  # type: ignore[arg-type]


def split(loader: object, part: int, parts: int) -> object:
    """This learner's part of a training loader, or the loader itself with a warning.

    Args:
        loader: what the user gave to the Trainer; shuffling, batch size, workers and the rest are kept.
        part: which part, 0..parts-1.
        parts: number of parts.
    """
    if not isinstance(loader, DataLoader):
        return _unsplit(loader, f"a {type(loader).__name__} is no torch DataLoader")
    if has_iterable_dataset(loader):
        return _unsplit(loader, f"{type(loader.dataset).__name__} is an iterable dataset")
    sampler = getattr(loader.batch_sampler, "sampler", None) if loader.batch_sampler else loader.sampler
    if isinstance(sampler, (DistributedSampler, PartSampler)):
        return loader
    if not hasattr(sampler, "__len__"):
        return _unsplit(loader, f"{type(loader.batch_sampler or sampler).__name__} has no sampler with a length")
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # as Lightning seeds its DistributedSampler
    try:
        return _with_sampler(loader, PartSampler(sampler, part, parts, seed))
    except (TypeError, MisconfigurationException) as error:
        return _unsplit(loader, str(error).strip())


def fork_random_state(learner_id: str) -> None:
    """Give this learner random numbers of its own, although the script seeds all learners alike.

    Args:
        learner_id: the fork is a function of this and of torch's present seed.
    """
    digest = hashlib.sha256(f"{torch.initial_seed()}/{learner_id}".encode()).digest()
    _seed_all(int.from_bytes(digest[:7], "big"))


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
