"""Lightning's checkpoints: they hold the anchor and, beside it, this learner's local parameters.

1. `state_dict` holds the anchor, so that it can be loaded anywhere. The local parameters are under CHECKPOINT_KEY, as
   tensors and plain values only.
2. Checkpoints that were saved since the last step are saved again when the run has been left, so they hold the
   parameters that `fit` leaves in the module. A checkpoint that a callback has chosen by a metric stays as it is,
   because the metric is that of its parameters. There is one if training is stopped by a validation, as by
   EarlyStopping. A local file that was deleted meanwhile stays deleted.
3. A tuner saves a checkpoint before its trial steps and restores it after them. Nothing is exchanged in between.

The checkpoints from which a learner recovers are in recovery/checkpointer.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import nn

from lightning_diloco.strategy.trainer.parameters import aliases

if TYPE_CHECKING:
    import lightning.pytorch as pl

CHECKPOINT_KEY = "decoupled_diloco"
CHECKPOINT_VERSION = 1
_CURRENT = "current_model_state"  # of WeightAveraging, which loads it when the callbacks are restored
TUNER_CHECKPOINTS = (".lr_find_", ".scale_batch_size_")


@dataclass(frozen=True, slots=True)
class SavedAs:
    """How one of Lightning's checkpoints was saved.

    Args:
        loops: state of the loops.
        weights_only: whether it holds weights only.
        storage_options: as given to the Trainer.
        was_there: whether it was in a local file afterwards; it is not while AsyncCheckpointIO writes it.
    """

    loops: Any
    weights_only: bool
    storage_options: Any
    was_there: bool


def save_again(trainer: pl.Trainer, saved: Mapping[str, SavedAs]) -> None:
    """Write the checkpoints of the last step again, with the present module and the saved state of the loops.

    Args:
        trainer: a Trainer whose learner has left the run.
        saved: how they were saved, by path.
    """
    strategy = trainer.strategy
    chosen = {path for callback in trainer.checkpoint_callbacks for path in _chosen_by_metric(callback)}
    for filepath, found in saved.items():
        is_deleted = strategy.broadcast(found.was_there and not os.path.exists(filepath))  # rank 0 knows
        if filepath in chosen or is_deleted:
            continue
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(found.weights_only)
        strategy.save_checkpoint({**checkpoint, "loops": found.loops}, filepath, found.storage_options)
        strategy.barrier("Trainer.save_checkpoint")


def load_local(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Load the local parameters of a checkpoint, and put them into a state of WeightAveraging that it holds."""
    local = checkpoint[CHECKPOINT_KEY]["local"]
    module.load_state_dict(local, strict=False)
    if (current := checkpoint.get(_CURRENT)) is not None:
        names = aliases(module)
        current.update({key: local[names[key]] for key in current if names.get(key) in local})


def _chosen_by_metric(callback: Checkpoint) -> Iterable[str]:
    """Return the paths of the checkpoints that a callback keeps because of their metric."""
    return callback.best_k_models if isinstance(callback, ModelCheckpoint) and callback.monitor is not None else ()
