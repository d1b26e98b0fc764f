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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_diloco.devices.dense import DenseFragments
from lightning_diloco.strategy.fit import SavedAs
from lightning_diloco.strategy.fit_holder import HoldsFit
from lightning_diloco.strategy.trainer.parameters import aliases

CHECKPOINT_KEY = "decoupled_diloco"
CHECKPOINT_VERSION = 1
_CURRENT = "current_model_state"  # of WeightAveraging, which loads it when the callbacks are restored
_TUNER_CHECKPOINTS = (".lr_find_", ".scale_batch_size_")


class AnchorInCheckpoints(HoldsFit):
    """Mixin of `DiLoCoHooks`."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the anchor in place of the local parameters."""
        state = super().lightning_module_state_dict()
        if (fit := self._joined) is not None:
            anchor = fit.named(fit.device.anchor)
            state.update({key: anchor[name] for key, name in fit.aliases.items() if name in anchor and key in state})
        return state

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint, with the local parameters unless it holds weights only."""
        if (fit := self._joined) is not None:
            loops, is_whole = checkpoint.get("loops"), "optimizer_states" in checkpoint
            if is_whole:
                checkpoint[CHECKPOINT_KEY] = {"version": CHECKPOINT_VERSION, "local": self._local_parameters()}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if fit is None:
            return
        fit.saved[os.fspath(filepath)] = SavedAs(loops, not is_whole, storage_options, os.path.exists(filepath))
        if Path(filepath).name.startswith(_TUNER_CHECKPOINTS):
            fit.tuner_checkpoint = os.fspath(filepath)
            fit.link.set_evaluating(True)

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; if it is a tuner's, its trial is over and exchange continues."""
        super().remove_checkpoint(filepath)
        if (fit := self._joined) is None:
            return
        fit.saved.pop(os.fspath(filepath), None)
        if os.fspath(filepath) == fit.tuner_checkpoint:
            fit.tuner_checkpoint = None
            fit.link.set_evaluating(False)

    def _save_again(self, saved: Mapping[str, SavedAs]) -> None:
        """Write the checkpoints of the last step again, with the present module and the saved state of the loops."""
        chosen = {path for callback in self._trainer.checkpoint_callbacks for path in _chosen_by_metric(callback)}
        for filepath, found in saved.items():
            is_deleted = self.broadcast(found.was_there and not os.path.exists(filepath))  # rank 0 knows
            if filepath in chosen or is_deleted:
                continue
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(found.weights_only)
            self.save_checkpoint({**checkpoint, "loops": found.loops}, filepath, found.storage_options)
            self.barrier("Trainer.save_checkpoint")

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the local parameters for a fit, and the anchor for everything else.

        A learner that begins a run begins it with the local parameters. A learner that joins a run adopts its anchor.
        WeightAveraging loads the trained model itself, later; it finds the local parameters in the checkpoint, too.
        """
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._note_built()
        super().load_model_state_dict(checkpoint, strict=strict)
        if self._trainer.state.fn == TrainerFn.FITTING and CHECKPOINT_KEY in checkpoint:
            assert self.lightning_module is not None
            local = checkpoint[CHECKPOINT_KEY]["local"]
            self.lightning_module.load_state_dict(local, strict=False)
            if (current := checkpoint.get(_CURRENT)) is not None:
                names = aliases(self.lightning_module)
                current.update({key: local[names[key]] for key in current if names.get(key) in local})

    def _note_built(self) -> None:
        """Note the module as the user's script has built it; called before a checkpoint is loaded."""

    def _local_parameters(self) -> dict[str, torch.Tensor]:
        fit = self._joined
        assert fit is not None
        values: Callable[[int], torch.Tensor] = fit.device.local_values
        if isinstance(fit.device, DenseFragments) and any(p.dtype == torch.float64 for p in fit.params.values()):
            values = partial(fit.device.local_values, dtype=torch.float64)
        return fit.named(values)


def _chosen_by_metric(callback: Checkpoint) -> Iterable[str]:
    """Return the paths of the checkpoints that a callback keeps because of their metric."""
    return callback.best_k_models if isinstance(callback, ModelCheckpoint) and callback.monitor is not None else ()
