"""What the outer loop does at a learner's inner steps.

1. An inner step ends after an optimizer's step. With manual optimization, it ends after a `training_step` in which any
   optimizer stepped.
2. Steps that do not pass through Lightning count as well (trainer/raw_steps.py). With automatic optimization, the first
   one of a batch ends the inner step.
3. Parameters change only after `link.settle()`: what is due to be sent is copied by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_diloco.strategy.data.token_counter import TokenCounter
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer
from lightning_diloco.strategy.trainer.losses import train_loss
from lightning_diloco.strategy.trainer.lr_schedules import hold_schedules
from lightning_diloco.strategy.trainer.optimizer_copies import ParameterCopies
from lightning_diloco.strategy.trainer.preemption import Preemption
from lightning_diloco.strategy.trainer.raw_steps import RawSteps
from lightning_diloco.strategy.trainer.stopping import Stopping
from lightning_diloco.strategy.trainer.unfreezing import check_frozen

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.learner.link import Link


class StepStrategy(Protocol):
    """The strategy, as far as it concerns inner steps."""

    @property
    def root_device(self) -> torch.device: ...
    @property
    def _exchanging(self) -> bool: ...
    def _begin_inner_step(self) -> None: ...
    def _end_inner_step(self, output: Any = None) -> None: ...


class InnerSteps:
    """The inner steps of one fit, from the join of the run until it is left.

    Args:
        strategy: of this learner.
        trainer: that trains.
        link: to the syncer.
        params: exchanged parameters by name.
        frozen: the other parameters by name.
        counter: has counted the batches of the step.
        copies: the optimizers' copies of parameters.
        checkpointer: writes this learner's checkpoints.
        preemption: watches for SIGTERM.
        stopping: decides when training stops.

    Attributes:
        has_stepped: whether an optimizer has stepped since the last inner step ended.
    """

    def __init__(
        self,
        strategy: StepStrategy,
        trainer: pl.Trainer,
        *,
        link: Link,
        params: Mapping[str, nn.Parameter],
        frozen: Mapping[str, nn.Parameter],
        counter: TokenCounter,
        copies: ParameterCopies,
        checkpointer: LearnerCheckpointer,
        preemption: Preemption,
        stopping: Stopping,
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._link = link
        self._frozen = frozen
        self._counter = counter
        self._copies = copies
        self._checkpointer = checkpointer
        self._preemption = preemption
        self._stopping = stopping
        self._raw_steps = RawSteps(list(params.values()), self._raw_step)
        self._is_closed = False
        self.has_stepped = False

    def close(self) -> None:
        """The run is left: the steps that follow are ordinary ones; idempotent."""
        self._is_closed = True
        self._raw_steps.close()

    def batch_begins(self) -> None:
        """Take a checkpoint if one is due: no step is under way between two batches."""
        self._raw_steps.batch_begins()
        if self._strategy._exchanging and (held_up_s := self._checkpointer.batch_begins()):
            self._link.held_up(held_up_s)

    @contextmanager
    def lightning_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Surround a step that Lightning makes."""
        self._raw_steps.is_known = True
        with nullcontext() if self._is_closed else self._checkpointer.warm_up.slowed(optimizer):
            yield
        self._raw_steps.is_known = False
        self.has_stepped = True

    def settling(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that settles after forward and backward, before the optimizer changes parameters."""

        def compute() -> Any:
            output = closure()
            self._link.settle()
            return output

        return closure if self._is_closed else compute

    @contextmanager
    def _raw_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Surround a step that Lightning does not see."""
        if not self._strategy._exchanging or not self._trainer.training:
            yield
            return
        ends = self._trainer.lightning_module.automatic_optimization and self._counter.has_counted
        if ends:
            self._strategy._begin_inner_step()
        self._link.settle()
        with self._checkpointer.warm_up.slowed(optimizer):
            yield
        self._copies.look([optimizer])
        self.has_stepped = True
        if ends:
            self._strategy._end_inner_step()

    def ended(self, output: Any) -> None:
        """Pass an ended inner step on to the link, and its metrics to the loggers.

        Args:
            output: what the optimizer's closure returned; None: unknown.
        """
        trainer, link = self._trainer, self._link
        check_frozen(trainer, self._frozen)
        self._copies.look(trainer.optimizers)
        self._checkpointer.step_done()
        self._preemption.has_trained = True
        hold_schedules(trainer)
        connector = trainer._logger_connector
        # A thread waits for other devices than the CPU, and only when Lightning logs.
        is_there = self._strategy.root_device.type == "cpu"
        if is_there or connector.should_update_logs:
            link.set_loss(train_loss(trainer, output), aside=not is_there)
        link.trainer_step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        link.step(*self._counter.take())
        self._stopping.heed(link)
        if trainer.loggers and connector.should_update_logs:
            # With an explicit step, which is the one of the user's metrics, those are neither changed nor flushed.
            connector.log_metrics(link.metrics(), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
