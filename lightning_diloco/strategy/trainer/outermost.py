"""A strategy's hooks that must come before those of all callbacks, of which Lightning calls the strategy's last.

Callbacks and modules put other weights in the place of parameters: averages for a validation, and for good when
training ends. What they find then must be the anchor, and what they put there must not be sent, or overwritten.

1. The anchor is shown before anybody's `on_validation_start`; it is hidden after everybody's `on_validation_end`.
2. The run is left before StochasticWeightAveraging's extra epoch, which begins with the averaged weights and makes no
   step; in any other fit at its last step (last_step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Outermost(Callback):
    """The first of a Trainer's callbacks, from `install` to `remove`.

    Args:
        validation_starts: called before any other hook of that name.
        leave: called when the last inner step is made.
    """

    def __init__(self, validation_starts: Callable[[], None], leave: Callable[[], None]) -> None:
        self._validation_starts = validation_starts
        self._leave = leave

    def install(self, trainer: pl.Trainer) -> None:
        """Be first; hooks that run now are not changed by it."""
        trainer.callbacks = [self, *trainer.callbacks]  # type: ignore[attr-defined]

    def remove(self, trainer: pl.Trainer) -> None:
        """The inverse; idempotent."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rule 1."""
        self._validation_starts()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rule 2."""
        averaging = (each for each in trainer.callbacks if isinstance(each, StochasticWeightAveraging))  # type: ignore[attr-defined]
        if any(trainer.current_epoch == each.swa_end + 1 for each in averaging):
            self._leave()
