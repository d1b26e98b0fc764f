"""Hooks that must run before those of all callbacks; Lightning calls the strategy's hooks last.

Callbacks and modules replace parameters with other weights, such as averages: for a validation, or for good when
training ends. They must find the anchor, and the weights that they set must be neither sent nor overwritten.

1. The anchor is shown before every `on_validation_start` and hidden after every `on_validation_end`.
2. The run is left before the extra epoch of StochasticWeightAveraging, which begins with the averaged weights and makes
   no step. In any other fit, the run is left at the last step (last_step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Outermost(Callback):
    """The first callback of a Trainer, from `install` to `remove`.

    Args:
        validation_starts: called before all other hooks `on_validation_start`.
        leave: called when the last inner step has been made.
    """

    def __init__(self, validation_starts: Callable[[], None], leave: Callable[[], None]) -> None:
        self._validation_starts = validation_starts
        self._leave = leave

    def install(self, trainer: pl.Trainer) -> None:
        """Become the first callback, in a new list, because Lightning may be iterating over the present one."""
        trainer.callbacks = [self, *trainer.callbacks]  # type: ignore[attr-defined]

    def remove(self, trainer: pl.Trainer) -> None:
        """Undo `install`; idempotent."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the anchor (rule 1)."""
        self._validation_starts()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the run before an epoch that only averages weights (rule 2)."""
        averaging = (each for each in trainer.callbacks if isinstance(each, StochasticWeightAveraging))  # type: ignore[attr-defined]
        if any(trainer.current_epoch == each.swa_end + 1 for each in averaging):
            self._leave()
