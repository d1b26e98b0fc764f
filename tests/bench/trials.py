"""Many independent trials, each in a process with one thread."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch


def outcomes(
    trials: Sequence[Callable[[], Any]], jobs: int, ended: Callable[[int, Any], None] = lambda *_: None
) -> list[Any]:
    """Return the results of all trials, in their order; `jobs` of them run at a time, each on one core.

    Args:
        trials: functions that can be pickled.
        jobs: number of processes.
        ended: called after each trial, with its index and result.
    """
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(trial): index for index, trial in enumerate(trials)}
        for future in as_completed(futures):
            ended(futures[future], future.result())
        return [future.result() for future in futures]


def by_seed(
    trial: Callable[..., Any], wanted: Sequence[tuple[Any, ...]], seeds: Sequence[int], *options: Any, jobs: int
) -> dict[tuple[Any, ...], list[Any]]:
    """Return the results of `trial(*key, seed, *options)` for all seeds, by key."""
    found = iter(outcomes([partial(trial, *key, seed, *options) for key in wanted for seed in seeds], jobs))
    return {key: [next(found) for _ in seeds] for key in wanted}
