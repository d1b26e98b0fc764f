"""Chooses the parameters that are validated during a fit, and reports the loss of the run's final anchor.

1. Validation sees the anchor, or this learner's own parameters if `evaluate="local"`. In the sanity check, the two are
   still equal.
2. The last learner of a run reports the loss of the final anchor, which its module holds then. If Lightning has not
   validated it, the learner does, unless this learner has begun the run by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_diloco.learner.name import given_address
from lightning_diloco.strategy.inner_steps import FitParts
from lightning_diloco.strategy.trainer.losses import (
    NOT_DRAINED,
    NOT_VALIDATED,
    Verdict,
    val_loss,
    validate_final,
    verdict,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Validation:
    """The validations of one fit.

    Args:
        trainer: the Trainer of the fit.
        fit: the fit.

    Attributes:
        shows_anchor: whether a validation of this fit sees the anchor now.
    """

    def __init__(self, trainer: pl.Trainer, fit: FitParts) -> None:
        self._strategy: Any = trainer.strategy
        self._trainer = trainer
        self._fit = fit
        self.shows_anchor = self._is_final = False
        self._verdict: Verdict = (None, NOT_VALIDATED)

    def show_anchor(self) -> None:
        """Show the anchor; called before all hooks of a validation."""
        if self._fit.is_exchanging and not self._trainer.sanity_checking:
            self._set_evaluating(True)
            self._fit.stopping.validation_starts(self._fit.link)

    def show_local(self) -> None:
        """Show the local parameters again; called after all hooks of a validation."""
        if self._fit.is_exchanging and not self._trainer.sanity_checking:
            self._set_evaluating(False)

    def ended(self) -> None:
        """Note the results of the validation that ends now."""
        if self._fit.is_exchanging and not self._trainer.sanity_checking:
            if self._strategy.evaluates_anchor:
                self._fit.stopping.anchor_was_validated(self._fit.link)
                if (loss := val_loss(self._trainer)) is not None:
                    self._fit.link.set_eval_loss(loss)
        elif self._is_final and self._verdict[1] == NOT_VALIDATED:
            self._verdict = verdict(self._trainer)

    def _set_evaluating(self, evaluating: bool) -> None:
        """Tell the link, and let the anchor and the local parameters change places."""
        self._strategy._drop_gathered()
        self._fit.link.set_evaluating(evaluating)
        if self._strategy.evaluates_anchor:
            (self._fit.device.show_anchor if evaluating else self._fit.device.show_local)()
            self.shows_anchor = evaluating

    def anchor_is_final(self, *, is_drained: bool) -> None:
        """Note that this was the run's last learner, so that the next validation is that of the final anchor.

        Args:
            is_drained: whether the anchor has all of this learner's work; if so, the module holds the anchor.
        """
        self._is_final = True
        self._verdict = (None, NOT_VALIDATED if is_drained else NOT_DRAINED)

    def report_final(self) -> None:
        """Report the final anchor's loss, or why there is none, when training ends; only the last learner does."""
        if not self._is_final:
            return
        wants_loss = self._verdict[1] == NOT_VALIDATED and given_address(self._strategy._learner) is not None
        if wants_loss and (problem := validate_final(self._trainer)):
            self._verdict = (None, problem)
        self._fit.link.report(*self._verdict)
