"""What Lightning's checkpoints hold: the anchor, and beside it this learner's own parameters.

1. `state_dict` is the anchor, so that anybody can load it; the local parameters lie under CHECKPOINT_KEY, as tensors
   and plain values only.
2. What was saved since the last step is saved again when the run has been left: all checkpoints of that step hold what
   `fit` leaves in the module.
3. A tuner that runs in the midst of training brackets its trial steps with a checkpoint of its own; nothing is
   exchanged in between.

What a learner goes on from after a failure is another thing: strategy/recovery/checkpointer.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.devices.dense import DenseFragments
from lightning_diloco.strategy.trainer.parameters import named_values

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.link import Link

CHECKPOINT_KEY = "decoupled_diloco"
CHECKPOINT_VERSION = 1

# How a checkpoint of this step was saved: where the loops were, whether it holds weights only, storage options.
_Saved = tuple[Any, bool, Any]

_TUNER_CHECKPOINTS = (".lr_find_", ".scale_batch_size_")


class AnchorInCheckpoints(Strategy):
    """Mixin of `DiLoCoHooks`."""

    _link: Link | None
    _device: FragmentDevice | None
    _params: dict[str, nn.Parameter]
    _aliases: dict[str, str]
    _tuner_checkpoint: str | None = None
    _saved: dict[str, _Saved]

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the anchor in place of the local parameters."""
        state = super().lightning_module_state_dict()
        if self._device is not None:
            anchor = self._named(self._device.anchor)
            state.update({key: anchor[name] for key, name in self._aliases.items() if name in anchor and key in state})
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Add the local parameters, unless only weights are wanted."""
        if self._device is not None:
            is_whole = "optimizer_states" in checkpoint
            self._saved[os.fspath(filepath)] = (checkpoint.get("loops"), not is_whole, storage_options)
            if is_whole:
                checkpoint[CHECKPOINT_KEY] = {"version": CHECKPOINT_VERSION, "local": self._local_parameters()}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._link is not None and Path(filepath).name.startswith(_TUNER_CHECKPOINTS):
            self._tuner_checkpoint = os.fspath(filepath)
            self._link.set_evaluating(True)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """A tuner removes its checkpoint when it has restored everything."""
        super().remove_checkpoint(filepath)
        if self._device is not None:
            self._saved.pop(os.fspath(filepath), None)
        if self._link is not None and os.fspath(filepath) == self._tuner_checkpoint:
            self._tuner_checkpoint = None
            self._link.set_evaluating(False)

    def _save_again(self) -> None:
        """The checkpoints of the last step, with the module as it is now; in all else as they were."""
        saved, self._saved = self._saved, {}
        for filepath, (loops, weights_only, storage_options) in saved.items():
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only)
            self.save_checkpoint({**checkpoint, "loops": loops}, filepath, storage_options)
            self.barrier("Trainer.save_checkpoint")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Training goes on from the local parameters; everything else gets the anchor.

        A learner that seeds a run then seeds it with them; one that joins a run adopts the run's anchor instead.
        """
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._note_built()
        super().load_model_state_dict(checkpoint, strict=strict)
        if self._trainer.state.fn == TrainerFn.FITTING and CHECKPOINT_KEY in checkpoint:
            assert self.lightning_module is not None
            self.lightning_module.load_state_dict(checkpoint[CHECKPOINT_KEY]["local"], strict=False)

    def _note_built(self) -> None:
        """The module is as the user's script has built it; a checkpoint comes."""

    def _local_parameters(self) -> dict[str, torch.Tensor]:
        assert self._device is not None
        values: Callable[[int], torch.Tensor] = self._device.local_values
        if isinstance(self._device, DenseFragments) and any(p.dtype == torch.float64 for p in self._params.values()):
            values = partial(self._device.local_values, dtype=torch.float64)
        return self._named(values)

    def _named(self, values: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self._link is not None
        return named_values(self._link.plan, self._link.config.block_size, self._params, values)
