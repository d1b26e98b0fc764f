"""Work that must come before the hooks of all callbacks, because Lightning calls the strategy's hooks last.

Callbacks and modules replace parameters with other weights, such as averages: for a validation, or for good when
training ends. They must find the anchor, and the weights that they set must be neither sent nor overwritten.

1. The anchor is shown before every `on_validation_model_eval`, which comes before `on_validation_start`, and hidden
   after every `on_validation_model_train`, which comes after `on_validation_end`. The methods of Lightning's loop that
   call these two are wrapped until `close`.
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


class AroundValidation:
    """Watches the validations of one fit (rule 1).

    Args:
        trainer: the Trainer of the fit.
        show_anchor: called before all hooks of a validation.
        show_local: called after all hooks of a validation.
    """

    def __init__(self, trainer: pl.Trainer, show_anchor: Callable[[], None], show_local: Callable[[], None]) -> None:
        self._loop = trainer.fit_loop.epoch_loop.val_loop
        self._show_anchor, self._show_local = show_anchor, show_local
        self._loop._on_evaluation_model_eval = self._on_model_eval  # type: ignore[method-assign]
        self._loop._on_evaluation_model_train = self._on_model_train  # type: ignore[method-assign]

    def close(self) -> None:
        """Restore the loop; idempotent."""
        self._loop.__dict__.pop("_on_evaluation_model_eval", None)
        self._loop.__dict__.pop("_on_evaluation_model_train", None)

    def _on_model_eval(self) -> None:
        self._show_anchor()
        type(self._loop)._on_evaluation_model_eval(self._loop)

    def _on_model_train(self) -> None:
        type(self._loop)._on_evaluation_model_train(self._loop)
        self._show_local()


class Outermost(Callback):
    """The first callback of a Trainer, from `install` to `remove`.

    Args:
        leave: called when the last inner step has been made.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def install(self, trainer: pl.Trainer) -> None:
        """Become the first callback, in a new list, because Lightning may be iterating over the present one."""
        trainer.callbacks = [self, *trainer.callbacks]  # type: ignore[attr-defined]

    def remove(self, trainer: pl.Trainer) -> None:
        """Undo `install`; idempotent."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the run before an epoch that only averages weights (rule 2)."""
        averaging = (each for each in trainer.callbacks if isinstance(each, StochasticWeightAveraging))  # type: ignore[attr-defined]
        if any(trainer.current_epoch == each.swa_end + 1 for each in averaging):
            self._leave()
