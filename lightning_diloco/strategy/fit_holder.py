"""Gives the strategy's hooks access to the current fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import Strategy

from lightning_diloco.strategy.fit import DiLoCoFit

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HoldsFit(Strategy):
    """Mixin: the fit of a strategy, or None before and after it."""

    _fit: DiLoCoFit | None = None

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _joined(self) -> DiLoCoFit | None:
        """The fit while this learner is a member of a run."""
        return self._fit if self._fit is not None and self._fit.is_member else None

    @property
    def _exchanging(self) -> bool:
        """Whether the current steps are part of the run; the steps of a tuner's trial are not."""
        return self._joined is not None and self._joined.tuner_checkpoint is None

    @property
    def _present(self) -> DiLoCoFit:
        assert self._fit is not None, "there is no fit"
        return self._fit
