"""What a Trainer knows besides the exchanged parameters: taken between two batches, and given back to another process.

1. Taking it copies tensors to the host and calls `state_dict` methods; it neither waits for anything nor writes.
2. It is taken where a batch begins, when the one before is complete in every respect, and its random numbers are given
   back in the same place: what a data loader draws while it starts does not count.
3. A peer's is taken over without what is a learner's own: random numbers, callbacks, and what a datamodule and data
   loaders keep. Step, epoch and batch are taken over, because schedules and limits go by them: a newcomer ends when the
   others do. What it reads there are samples of its own part and order (`splitting.py`).
4. Optimizers and schedulers must be those it was taken from, by class and number of parameters.

Random numbers are those of torch, CUDA, numpy and Python; an XLA device's own are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_diloco.runtime.tree import UnstorableError, pack

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.strategy.hooks import DiLoCoHooks

State = dict[str, Any]

DATA = "datamodule"


def take(trainer: pl.Trainer, warned: set[str]) -> tuple[State, list[str]]:
    """The state as it is now.

    Args:
        trainer: between two batches.
        warned: receives the names of callbacks, or DATA, whose state cannot be kept.

    Returns:
        The state, sharing no memory with the live one, and one sentence for each name that is newly in `warned`.
    """
    data = call._call_lightning_datamodule_hook(trainer, "state_dict") if trainer.datamodule else {}
    own, sentences = _storable({**call._call_callbacks_state_dict(trainer), DATA: data}, warned)
    strategy = cast("DiLoCoHooks", trainer.strategy)
    state = {
        "kinds": _kinds(trainer),
        "module": strategy.own_state.take(),
        "loops": trainer.fit_loop.state_dict(),
        "batches_that_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "optimizer_states": [strategy.held_optimizer_state(optimizer) for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin.state_dict(),
        "datamodule": own.pop(DATA, {}),
        "callbacks": own,
        "random": _random_state(),
    }
    copied: State = tree_map(_copy, state)
    return copied, sentences


def objection(trainer: pl.Trainer, state: State, *, is_own: bool) -> str | None:
    """Why this Trainer cannot go on from this state, or None."""
    if state["kinds"] != (kinds := _kinds(trainer)):
        return f"it is of {state['kinds']}, this learner has {kinds}"
    if problem := cast("DiLoCoHooks", trainer.strategy).own_state.objection(state["module"]):
        return problem
    numbers = [t for t in tree_leaves(state["optimizer_states"]) if isinstance(t, Tensor) and t.is_floating_point()]
    if not is_own and not all(bool(torch.isfinite(t).all()) for t in numbers):
        return "its optimizer holds NaN or Inf"
    return None


def give(trainer: pl.Trainer, state: State, *, is_own: bool) -> None:
    """Take over everything but what `begin` gives back.

    Args:
        trainer: about to train; Lightning has restored nothing.
        state: to which there is no objection.
        is_own: this learner's own, rather than a peer's.
    """
    loops = state["loops"]
    if not is_own:
        loops = {**loops, "state_dict": {k: v for k, v in loops["state_dict"].items() if k != "combined_loader"}}
    trainer.fit_loop.load_state_dict(loops)
    strategy = cast("DiLoCoHooks", trainer.strategy)
    strategy.own_state.give(state["module"])
    strategy.give_optimizer_states(state)
    for config, saved in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(state["precision"])
    if is_own:
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
    if is_own and state["datamodule"]:
        call._call_lightning_datamodule_hook(trainer, "load_state_dict", state["datamodule"])


def begin(trainer: pl.Trainer, state: State, *, is_own: bool) -> None:
    """Where the first batch begins: loggers count on from the same step, random numbers go on."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = state["batches_that_stepped"]
    total = loop.batch_progress.total
    total.ready = total.completed + 1  # this batch, which had begun when the state was taken, is not counted twice
    if is_own:
        _set_rng_states(state["random"])


def position(state: State) -> tuple[int, int]:
    """Epoch, and batches of it that were trained with."""
    loops = state["loops"]
    return (
        loops["epoch_progress"]["current"]["processed"],
        loops["epoch_loop.batch_progress"]["current"]["completed"],
    )


def _kinds(trainer: pl.Trainer) -> list[str]:
    optimizers = [
        f"{_name(optimizer)} over {sum(len(group['params']) for group in optimizer.param_groups)} parameters"
        for optimizer in trainer.optimizers
    ]
    return optimizers + [_name(config.scheduler) for config in trainer.lr_scheduler_configs]


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _copy(leaf: object) -> object:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _random_state() -> State:
    state = _collect_rng_states()
    name, keys, *rest = state["numpy"]
    return {**state, "numpy": (name, keys.tolist(), *rest)}


def _storable(callbacks: Mapping[str, Any], warned: set[str]) -> tuple[State, list[str]]:
    kept, sentences = {}, []
    for name, state in callbacks.items():
        try:
            pack(state, {}, name)
            kept[name] = state
        except UnstorableError as error:
            sentences += [] if name in warned else [str(error)]
            warned.add(name)
    return kept, sentences
