"""Finds the last step of a fit: the run is left there, before Lightning validates and saves for the last time.

1. Lightning has no hook between the callbacks' `on_train_batch_end` and the validation after it, and none before their
   `on_train_end`. So the methods that its loops call there are wrapped until `close`.
2. Usually it is known after a batch that no step follows. Lightning then validates and saves the parameters that `fit`
   leaves in the module.
3. If training is stopped later, such as by EarlyStopping after that validation, this is known before the callbacks'
   `on_train_end`. These hooks find an ordinary module, and their changes to it stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.utilities import _is_max_limit_reached

if TYPE_CHECKING:
    import lightning.pytorch as pl


class LastStep:
    """Watches one fit.

    Args:
        trainer: the Trainer of the fit.
        leave: called when the last step has been made; may be called again.
        end: called once, before the callbacks' `on_train_end`.
    """

    def __init__(self, trainer: pl.Trainer, leave: Callable[[], None], end: Callable[[], None]) -> None:
        self._trainer, self._leave, self._end = trainer, leave, end
        trainer.fit_loop.epoch_loop.on_advance_end = self._on_batch_end  # type: ignore[method-assign]
        trainer.fit_loop.on_run_end = self._on_run_end  # type: ignore[method-assign]

    def close(self) -> None:
        """Restore the loops; idempotent."""
        self._trainer.fit_loop.epoch_loop.__dict__.pop("on_advance_end", None)
        self._trainer.fit_loop.__dict__.pop("on_run_end", None)

    def _on_batch_end(self, *args: Any) -> None:
        if is_last_step(self._trainer):
            self._leave()
        loop = self._trainer.fit_loop.epoch_loop
        type(loop).on_advance_end(loop, *args)

    def _on_run_end(self) -> None:
        self._end()
        loop = self._trainer.fit_loop
        type(loop).on_run_end(loop)


def is_last_step(trainer: pl.Trainer) -> bool:
    """Return whether Lightning's loops will make no step after the present batch."""
    fit = trainer.fit_loop
    steps, is_epoch_end = fit.epoch_loop.global_step, fit.epoch_loop._num_ready_batches_reached()
    epochs = fit.epoch_progress.current.processed + is_epoch_end
    if _is_max_limit_reached(steps, fit.max_steps):
        return True
    if trainer.should_stop and epochs >= (fit.min_epochs or 0) and steps >= (fit.min_steps or 0):
        return True
    return is_epoch_end and fit.max_epochs is not None and _is_max_limit_reached(epochs, fit.max_epochs)
