"""Where a fit has made its last step: the run is left there, before Lightning validates and saves for the last time.

1. Lightning has no hook between the callbacks' `on_train_batch_end` and the validation after it, nor before their
   `on_train_end`: what its loops call there is wrapped, until `close`.
2. Most often it is known after a batch that no step follows. What Lightning validates and saves then is what `fit`
   leaves in the module.
3. What stops training later, such as EarlyStopping by that validation, is known before `on_train_end` of callbacks.
   These find an ordinary module, and what they leave in it stays there.
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
        trainer: that fits.
        leave: called when the last step is known to be done; perhaps again.
        end: called before the callbacks' `on_train_end`, once.
    """

    def __init__(self, trainer: pl.Trainer, leave: Callable[[], None], end: Callable[[], None]) -> None:
        self._trainer, self._leave, self._end = trainer, leave, end
        trainer.fit_loop.epoch_loop.on_advance_end = self._on_batch_end  # type: ignore[method-assign]
        trainer.fit_loop.on_run_end = self._on_run_end  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the loops as they were; idempotent."""
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
    """Whether Lightning's loops make no step after the batch just done; they have not acted on it yet."""
    fit = trainer.fit_loop
    steps, is_epoch_end = fit.epoch_loop.global_step, fit.epoch_loop._num_ready_batches_reached()
    epochs = fit.epoch_progress.current.processed + is_epoch_end
    if _is_max_limit_reached(steps, fit.max_steps):
        return True
    if trainer.should_stop and epochs >= (fit.min_epochs or 0) and steps >= (fit.min_steps or 0):
        return True
    return is_epoch_end and fit.max_epochs is not None and _is_max_limit_reached(epochs, fit.max_epochs)
