"""The state of a Trainer without the exchanged parameters: taken between two batches, restored in another process.

1. Taking it copies tensors to the host and calls `state_dict` methods, and the hooks `on_save_checkpoint` of callbacks
   and of the module (checkpoint_hooks.py); it neither waits nor writes.
2. It is taken at the start of a batch, when the batch before is complete. Random states are restored at the same place,
   so that the numbers that a data loader draws while it starts do not matter.
3. A newcomer takes over the state of a peer without the peer's own parts: random states, callbacks, and the states of
   datamodule and data loaders. It takes over step, epoch and batch, which schedules and limits depend on, so that it
   ends when the other learners end. It reads samples of its own part in its own order (`strategy/data/hooks.py`).
4. Optimizers and schedulers must be the same, by class and by names of parameters. An optimizer may have had more
   groups than now, because finetuning callbacks add groups when they unfreeze a part of the module. The groups are
   added here and their parameters are trainable again. The state of such a callback depends on the epoch, so a peer's
   is taken over.

Random states are those of torch, numpy, Python, and of the accelerator if its module in torch has `get_rng_state`
(CUDA, MPS, XPU). That of XLA devices is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_diloco.storage.tree import UnstorableError, pack
from lightning_diloco.strategy.recovery import checkpoint_hooks
from lightning_diloco.strategy.recovery.optimizer_state import State
from lightning_diloco.strategy.trainer.parameters import named_parameters

if TYPE_CHECKING:
    import lightning.pytorch as pl

Groups = list[list[list[str | None]]]

DATA = "datamodule"


def take(trainer: pl.Trainer, warned: set[str]) -> tuple[State, list[str]]:
    """Take the present state.

    Args:
        trainer: a Trainer between two batches.
        warned: names of callbacks and hooks, or DATA, whose state cannot be stored; new ones are added.

    Returns:
        The state, which shares no memory with the live one, and one sentence for each name added to `warned`.
    """
    data = call._call_lightning_datamodule_hook(trainer, "state_dict") if trainer.datamodule else {}
    own, sentences = _storable({**call._call_callbacks_state_dict(trainer), DATA: data}, warned)
    strategy: Any = trainer.strategy
    fit = strategy._present
    state = {
        "kinds": _kinds(trainer),
        "groups": _groups(trainer),
        "trainable": [name for name, p in fit.params.items() if p.requires_grad],
        "module": fit.own_state.take(),
        "loops": trainer.fit_loop.state_dict(),
        "batches_that_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "optimizer_states": [strategy.held_optimizer_state(optimizer) for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin.state_dict(),
        "datamodule": own.pop(DATA, {}),
        "callbacks": own,
        "random": random_state(strategy.root_device),
    }
    copied: State = tree_map(_copy, state)
    if strategy._holds_all:
        hooks, failed = checkpoint_hooks.take(trainer, state, warned)
        hooks, unstorable = _storable(hooks, warned)
    else:
        hooks, failed, unstorable = {}, _not_called(trainer, warned), []
    copied["hooks"] = tree_map(_copy, hooks)
    return copied, [*sentences, *failed, *unstorable]


def objection(trainer: pl.Trainer, state: State, *, is_own: bool) -> str | None:
    """Return why this Trainer cannot continue from a state; None if it can."""
    if state["kinds"] != (kinds := _kinds(trainer)):
        return f"it is of {state['kinds']}, this learner has {kinds}"
    if problem := _objection_to_groups(trainer, state["groups"]):
        return problem
    if problem := trainer.strategy._present.own_state.objection(state["module"]):
        return problem
    numbers = [t for t in tree_leaves(state["optimizer_states"]) if isinstance(t, Tensor) and t.is_floating_point()]
    if not is_own and not all(bool(torch.isfinite(t).all()) for t in numbers):
        return "its optimizer holds NaN or Inf"
    return None


def give(trainer: pl.Trainer, state: State, *, is_own: bool) -> None:
    """Restore everything that `begin` does not restore.

    Args:
        trainer: a Trainer that is about to train; Lightning has restored nothing.
        state: a state without an objection.
        is_own: whether it is this learner's own state rather than a peer's.
    """
    loops = state["loops"]
    if not is_own:
        loops = {**loops, "state_dict": {k: v for k, v in loops["state_dict"].items() if k != "combined_loader"}}
    trainer.fit_loop.load_state_dict(loops)
    strategy: Any = trainer.strategy
    strategy._present.own_state.give(state["module"])
    _unfreeze(trainer, state)
    strategy.give_optimizer_states(state)
    for config, saved in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(state["precision"])
    finetuning = [each for each in trainer.callbacks if isinstance(each, BaseFinetuning)]  # type: ignore[attr-defined]
    taken = {each.state_key for each in finetuning}
    callbacks = {key: each for key, each in state["callbacks"].items() if is_own or key in taken}
    call._call_callbacks_load_state_dict(trainer, {"callbacks": callbacks})
    for each in finetuning:
        each._restarting = False  # else the next fit would restore this fit's groups
    if is_own:
        checkpoint_hooks.give(trainer, state, strategy._present.params)
    if is_own and state["datamodule"]:
        call._call_lightning_datamodule_hook(trainer, "load_state_dict", state["datamodule"])


def begin(trainer: pl.Trainer, state: State, *, is_own: bool) -> None:
    """Restore the step of the loggers and the random states, at the start of the first batch."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = state["batches_that_stepped"]
    total = loop.batch_progress.total
    total.ready = total.completed + 1  # the state was taken after this batch had begun; do not count it twice
    if is_own:
        restore_random_state(state["random"], trainer.strategy.root_device)


def position(state: State) -> tuple[int, int]:
    """Return the epoch, and how many of its batches were trained."""
    loops = state["loops"]
    return (
        loops["epoch_progress"]["current"]["processed"],
        loops["epoch_loop.batch_progress"]["current"]["completed"],
    )


def _kinds(trainer: pl.Trainer) -> list[str]:
    kinds = [*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)]
    return [_name(each) for each in kinds]


def _groups(trainer: pl.Trainer) -> Groups:
    """Return names of parameters by optimizer and group; None for a parameter that does not belong to the module."""
    names = {id(p): name for name, p in named_parameters(trainer.lightning_module).items()}
    return [[[names.get(id(p)) for p in group["params"]] for group in each.param_groups] for each in trainer.optimizers]


def _objection_to_groups(trainer: pl.Trainer, stored: Groups) -> str | None:
    """Return why stored groups are not the optimizers' present groups, perhaps with more of them; None if they are."""
    known = named_parameters(trainer.lightning_module)
    for number, (mine, theirs) in enumerate(zip(_groups(trainer), stored, strict=True)):
        added = [name for group in theirs[len(mine) :] for name in group]
        if theirs[: len(mine)] != mine or not all(name in known for name in added):
            sizes = [[len(group) for group in each] for each in (theirs, mine)]
            return f"groups of its optimizer {number} hold other parameters: {sizes[0]} of them, here {sizes[1]}"
    return None


def _unfreeze(trainer: pl.Trainer, state: State) -> None:
    """Add groups to optimizers and make parameters trainable (rule 4)."""
    params = named_parameters(trainer.lightning_module)
    for optimizer, groups in zip(trainer.optimizers, state["groups"], strict=True):
        for names in groups[len(optimizer.param_groups) :]:
            optimizer.add_param_group({"params": [params[name] for name in names]})
    for name, p in trainer.strategy._present.params.items():
        p.requires_grad_(name in state["trainable"])


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _copy(leaf: object) -> object:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def random_state(device: torch.device) -> State:
    """Return the states of all global random generators, with that of a device of this type."""
    state = _collect_rng_states()
    name, keys, *rest = state["numpy"]
    own = _generators(device)
    return {**state, "numpy": (name, keys.tolist(), *rest), "device": None if own is None else own.get_rng_state()}


def restore_random_state(state: State, device: torch.device) -> None:
    """Restore the states of all global random generators; that of another type of device is ignored."""
    _set_rng_states(state)
    own, saved = _generators(device), state.get("device")
    if own is not None and saved is not None:
        own.set_rng_state(saved)


def _generators(device: torch.device) -> Any:
    """Return torch's module of this type of device; None if Lightning has its states, or if it has none."""
    if device.type in ("cpu", "cuda", "xla"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state") else None


def _not_called(trainer: pl.Trainer, warned: set[str]) -> list[str]:
    names = [name for name in checkpoint_hooks.owners(trainer) if name not in warned]
    warned.update(names)
    return [f"{name} is not called, because this learner's devices shard the model" for name in names]


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
