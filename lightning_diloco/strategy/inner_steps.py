"""The outer loop's work at a learner's inner steps.

1. An inner step ends after an optimizer's step. With manual optimization, it ends after a `training_step` in which any
   optimizer stepped, because gradients may be computed with the parameters until then. If no torch optimizer holds
   exchanged parameters, the user's code changes them itself, and every `training_step` ends an inner step.
2. Steps that do not pass through Lightning count as well (trainer/raw_steps.py). With automatic optimization, the first
   such step of a batch ends the inner step.
3. A snapshot that is taken at the end of an inner step may be copied while the next forward and backward are computed.
   `link.settle()` completes the copy, before gradients are clipped and an optimizer changes parameters, and before
   validation. If other code changes parameters meanwhile (clamping at a batch's start or end, `max_norm` of an
   embedding, an optimizer that steps within the backward), some values are sent as they were before the change. Nothing
   is lost: the rest stays progress of this learner and is part of the next contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer

from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.strategy.data.token_counter import TokenCounter
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer
from lightning_diloco.strategy.trainer.losses import train_loss
from lightning_diloco.strategy.trainer.lr_schedules import hold_schedules
from lightning_diloco.strategy.trainer.optimizer_copies import ParameterCopies
from lightning_diloco.strategy.trainer.preemption import Preemption
from lightning_diloco.strategy.trainer.raw_steps import RawSteps
from lightning_diloco.strategy.trainer.stopping import Stopping
from lightning_diloco.strategy.trainer.unfreezing import FrozenLater, check_frozen, check_held, held_by

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.link import Link


class FitParts(Protocol):
    """The part of a fit (fit.py) that inner steps and validation use."""

    params: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    counter: TokenCounter
    copies: ParameterCopies
    preemption: Preemption
    link: Link
    device: FragmentDevice[Any, Any]
    checkpointer: LearnerCheckpointer
    stopping: Stopping

    @property
    def is_exchanging(self) -> bool: ...


class InnerSteps:
    """The inner steps of one fit, from the join of the run until it is left.

    Args:
        trainer: the Trainer of the fit.
        fit: a fit that has joined the run.

    Attributes:
        has_stepped: whether an optimizer has stepped since the last inner step ended.
        num_batches: number of batches that have begun.
        num_ended: number of inner steps that have ended.
    """

    def __init__(self, trainer: pl.Trainer, fit: FitParts) -> None:
        self._strategy: Any = trainer.strategy
        self._trainer = trainer
        self._fit = fit
        self._raw_steps = RawSteps(list(fit.params.values()), self._raw_step)
        self._known = held_by(trainer).union(map(id, (*fit.params.values(), *fit.frozen.values())))
        self._frozen_later = FrozenLater(fit.params)
        self._is_closed = False
        self._has_seen_step = False
        self.has_stepped = False
        self.num_batches = self.num_ended = 0

    @property
    def are_by_hand(self) -> bool:
        """Whether no known torch optimizer trains exchanged parameters; used with manual optimization."""
        params = map(id, self._fit.params.values())
        return not self._has_seen_step and held_by(self._trainer).isdisjoint(params)

    @property
    def are_missed(self) -> bool:
        """Whether enough batches for an inner step were trained, but none has ended."""
        return not self.num_ended and self.num_batches >= self._trainer.accumulate_grad_batches

    def close(self) -> None:
        """Stop watching steps, because the run is left; idempotent."""
        self._is_closed = True
        self._raw_steps.close()

    def batch_begins(self) -> None:
        """Take a checkpoint if one is due; between two batches, no step is in progress."""
        self._frozen_later.batch_begins()
        self.num_batches += self._fit.is_exchanging
        self._raw_steps.batch_begins()
        if self._fit.is_exchanging and (held_up_s := self._fit.checkpointer.batch_begins()):
            self._fit.link.held_up(held_up_s)

    @contextmanager
    def lightning_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Surround a step that Lightning makes."""
        self._raw_steps.is_known = self._has_seen_step = True
        self._frozen_later.step_begins()
        with nullcontext() if self._is_closed else self._fit.checkpointer.warm_up.slowed(optimizer):
            yield
        self._raw_steps.is_known = False
        self.has_stepped = True

    def settling(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that settles after forward and backward, before the optimizer changes parameters."""

        def compute() -> Any:
            output = closure()
            self._fit.link.settle()
            return output

        return closure if self._is_closed else compute

    @contextmanager
    def _raw_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Surround a step that Lightning does not see."""
        self._has_seen_step = True
        self._frozen_later.step_begins()
        if not self._fit.is_exchanging or not self._trainer.training:
            yield
            return
        ends = self._trainer.lightning_module.automatic_optimization and self._fit.counter.has_counted
        if ends:
            self._strategy._begin_inner_step()
        self._fit.link.settle()
        with self._fit.checkpointer.warm_up.slowed(optimizer):
            yield
        self._fit.copies.look([optimizer])
        self.has_stepped = True
        if ends:
            self._strategy._end_inner_step()

    def ended(self, output: Any) -> None:
        """Pass an ended inner step on to the link, and its metrics to the loggers.

        Args:
            output: return value of the optimizer's closure; None: unknown.
        """
        trainer, fit = self._trainer, self._fit
        self.num_ended += 1
        check_frozen(trainer, fit.frozen)
        check_held(trainer, self._known)
        fit.copies.look(trainer.optimizers)
        fit.checkpointer.step_done()
        fit.preemption.has_trained = True
        hold_schedules(trainer)
        connector = trainer._logger_connector
        # On an accelerator, another thread waits for the loss, and only if Lightning logs at this step.
        is_there = self._strategy.root_device.type == "cpu"
        if is_there or connector.should_update_logs:
            fit.link.set_loss(train_loss(trainer, output), aside=not is_there)
        fit.link.trainer_step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        fit.link.step(*fit.counter.take())
        fit.stopping.heed(fit.link)
        if trainer.loggers and connector.should_update_logs:
            # The explicit step is that of the user's metrics, so Lightning neither changes nor flushes those.
            connector.log_metrics(fit.link.metrics(), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
