"""How the strategy's hooks reach the present fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.strategy.data.token_counter import TokenCounter
from lightning_diloco.strategy.fit import DiLoCoFit
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer
from lightning_diloco.strategy.trainer.optimizer_copies import ParameterCopies
from lightning_diloco.strategy.trainer.preemption import Preemption
from lightning_diloco.strategy.trainer.stopping import Stopping

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.link import Link


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
        """Whether the steps that are made now are part of the run; those of a tuner's trial are not."""
        return self._joined is not None and self._joined.tuner_checkpoint is None

    # --- parts of it, for the final classes ----------------------------------------------------------------------

    @property
    def _link(self) -> Link | None:
        return None if self._joined is None else self._joined.link

    @property
    def _device(self) -> FragmentDevice[Any, Any] | None:
        return None if self._joined is None else self._joined.device

    @property
    def _params(self) -> dict[str, nn.Parameter]:
        return self._present.params

    @property
    def _counter(self) -> TokenCounter:
        return self._present.counter

    @property
    def _copies(self) -> ParameterCopies:
        return self._present.copies

    @property
    def _checkpointer(self) -> LearnerCheckpointer:
        return self._present.checkpointer

    @property
    def _preemption(self) -> Preemption:
        return self._present.preemption

    @property
    def _stopping(self) -> Stopping:
        return self._present.stopping

    @property
    def _present(self) -> DiLoCoFit:
        assert self._fit is not None, "there is no fit"
        return self._fit
