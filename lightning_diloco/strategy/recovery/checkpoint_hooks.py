"""State that callbacks and the module store by `on_save_checkpoint`, such as the average of WeightAveraging.

1. Each hook gets a checkpoint of its own, with the main entries of Lightning's. The entries that it adds or replaces
   are kept, and given back by `on_load_checkpoint`. The others are not stored a second time.
2. `state_dict` holds the live tensors of the module. If a hook moves it to another key and puts other weights in its
   place, the other weights are kept, and of the module's only the key. On load, it is the module's present state again.
   If a hook only replaces or edits `state_dict`, this is not kept, because the parameters come from the run. For the
   same reason, exchanged parameters that a hook loads are replaced by those of the run.
3. If the devices of a learner shard the model, no hook is called, because a whole `state_dict` would be gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_diloco.strategy.recovery.optimizer_state import State

_SAVE, _LOAD, _MODEL = "on_save_checkpoint", "on_load_checkpoint", "state_dict"


def owners(trainer: pl.Trainer) -> dict[str, Callback | pl.LightningModule]:
    """Return the callbacks and the module that override both hooks, by name; both are needed for a restore."""
    module = trainer.lightning_module
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found: dict[str, Callback | pl.LightningModule] = {}
    for each in callbacks:
        if all(is_overridden(hook, each, parent=Callback) for hook in (_SAVE, _LOAD)):
            name = f"{each.state_key}.{_SAVE}"
            number = sum(known.partition(" ")[0] == name for known in found)
            found[f"{name} ({number + 1})" if number else name] = each
    if all(is_overridden(hook, module) for hook in (_SAVE, _LOAD)):
        found[f"{type(module).__name__}.{_SAVE}"] = module
    return found


def take(trainer: pl.Trainer, state: State, warned: set[str]) -> tuple[State, list[str]]:
    """Call all hooks `on_save_checkpoint`.

    Args:
        trainer: a Trainer between two batches.
        state: its state; hooks may edit its dicts and lists.
        warned: names of hooks that cannot be called; new ones are added.

    Returns:
        The entries of each hook, by its name, as live tensors; and one sentence for each name added to `warned`.
    """
    kept: State = {}
    sentences = []
    for name, owner in owners(trainer).items():
        given = _checkpoint(trainer, state)
        checkpoint = dict(given)
        try:
            _call(trainer, owner, _SAVE, checkpoint)
        except Exception as error:
            if name not in warned:
                warned.add(name)
                sentences.append(f"{name} failed ({type(error).__name__}: {error})")
            continue
        added = {key: value for key, value in checkpoint.items() if key not in given or value is not given[key]}
        moved_to = [key for key, value in added.items() if value is given[_MODEL]]
        for key in moved_to or [_MODEL]:
            added.pop(key, None)
        kept[name] = {"added": added, "model": moved_to}
    return kept, sentences


def give(trainer: pl.Trainer, state: State, exchanged: Mapping[str, Tensor]) -> None:
    """Call the hooks `on_load_checkpoint` of those whose `on_save_checkpoint` was called for this state.

    Args:
        trainer: the Trainer of the fit.
        state: the restored state.
        exchanged: the exchanged parameters, which come from the run. If a hook loads others, they are put back.
    """
    if not (hooks := state.get("hooks", {})):  # older checkpoints have none
        return
    values = {name: p.detach().to("cpu", copy=True) for name, p in exchanged.items()}
    for name, owner in owners(trainer).items():
        if (kept := hooks.get(name)) is not None:
            given = _checkpoint(trainer, state)
            model = dict.fromkeys(kept["model"], given[_MODEL])
            _call(trainer, owner, _LOAD, {**given, **model, **kept["added"]})
    with torch.no_grad():
        for name, p in exchanged.items():
            p.copy_(values[name])


def _checkpoint(trainer: pl.Trainer, state: State) -> dict[str, Any]:
    """Return the main entries of the checkpoint that Lightning would save."""
    module = trainer.lightning_module
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "loops": {"fit_loop": copy.deepcopy(state["loops"])},
        _MODEL: module.state_dict(),
        **{name: state[name] for name in ("callbacks", "optimizer_states", "lr_schedulers")},
        **({module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams)} if module.hparams else {}),
    }


def _call(trainer: pl.Trainer, owner: Callback | pl.LightningModule, hook: str, checkpoint: dict[str, Any]) -> None:
    whose = (trainer, trainer.lightning_module) if isinstance(owner, Callback) else ()
    getattr(owner, hook)(*whose, checkpoint)
