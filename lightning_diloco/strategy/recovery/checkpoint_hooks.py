"""What callbacks and the module keep by `on_save_checkpoint`, such as the average of WeightAveraging.

1. Each hook gets a checkpoint of its own, with the main entries of Lightning's. The entries that it adds or replaces
   are kept, and given back by `on_load_checkpoint`. The others are not stored a second time.
2. `state_dict` holds the live tensors of the module. If a hook moves it to another key and puts other weights in its
   place, the other weights are kept, and of the module's only the key. On load, it is the module's present state again.
   If a hook only replaces or edits `state_dict`, this is not kept, because the parameters come from the run.
3. If the devices of a learner shard the model, no hook is called, because a whole `state_dict` would be gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    from lightning_diloco.strategy.recovery.trainer_state import State

_SAVE, _LOAD, _MODEL = "on_save_checkpoint", "on_load_checkpoint", "state_dict"


def owners(trainer: pl.Trainer) -> dict[str, Callback | pl.LightningModule]:
    """Return the callbacks and the module that override `on_save_checkpoint`, by the names of their hooks."""
    module = trainer.lightning_module
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found: dict[str, Callback | pl.LightningModule] = {
        f"{each.state_key}.{_SAVE}": each for each in callbacks if is_overridden(_SAVE, each, parent=Callback)
    }
    return found | ({f"{type(module).__name__}.{_SAVE}": module} if is_overridden(_SAVE, module) else {})


def take(trainer: pl.Trainer, state: State) -> State:
    """Call all hooks `on_save_checkpoint`.

    Args:
        trainer: a Trainer between two batches.
        state: its state; hooks may edit its dicts and lists.

    Returns:
        What is kept of each hook, by its name; live tensors.
    """
    kept: State = {}
    for name, owner in owners(trainer).items():
        given = _checkpoint(trainer, state)
        checkpoint = dict(given)
        _call(trainer, owner, _SAVE, checkpoint)
        added = {key: value for key, value in checkpoint.items() if key not in given or value is not given[key]}
        moved_to = [key for key, value in added.items() if value is given[_MODEL]]
        left_out = [*moved_to, *([] if moved_to else [_MODEL])]
        kept[name] = {"added": {key: added[key] for key in added if key not in left_out}, "model": moved_to}
    return kept


def give(trainer: pl.Trainer, state: State) -> None:
    """Call the hooks `on_load_checkpoint` of those whose `on_save_checkpoint` was called for this state."""
    for name, owner in owners(trainer).items():
        if (kept := state["hooks"].get(name)) is not None:
            given = _checkpoint(trainer, state)
            model = dict.fromkeys(kept["model"], given[_MODEL])
            _call(trainer, owner, _LOAD, {**given, **model, **kept["added"]})


def _checkpoint(trainer: pl.Trainer, state: State) -> dict[str, Any]:
    """Return the main entries of the checkpoint that Lightning would save."""
    module = trainer.lightning_module
    entries = ("loops", "callbacks", "optimizer_states", "lr_schedulers")
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        _MODEL: module.state_dict(),
        **{name: state[name] for name in entries},
        **({module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams)} if module.hparams else {}),
    }


def _call(trainer: pl.Trainer, owner: Callback | pl.LightningModule, hook: str, checkpoint: dict[str, Any]) -> None:
    whose = (trainer, trainer.lightning_module) if isinstance(owner, Callback) else ()
    getattr(owner, hook)(*whose, checkpoint)
