"""Learning rates of a learner that is not alone: by the tokens of the fleet, or by its own steps from where the run is.

By tokens that the whole fleet has seen, wherever a learner stands itself:

1. Tokens of others are those that the syncer told last, about a second ago; a learner's own are exact. While it is
   offline its own go on counting.
2. A learner that joins late starts where the run is: its first step has the rate of the run's present position.
3. All ranks of a learner have one rate, that of the tokens when the step began: rank 0 tells the others then.

By steps (any scheduler with "interval": "step"):

4. Who joins late goes on from a checkpoint, schedule included. Who finds none begins at the run's position in steps of
   one learner: periods that were merged times `sync_every`, at most one period less than the truth.
5. `max_steps` counts a learner's own steps, late or not, and is the end that its schedules were made for: from there on
   they stay. Without `max_steps` their end is not known, and they begin at their start.
6. Schedules by epochs, on a plateau, and those that manual optimization steps are the user's.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class FleetTokenLR(LambdaLR):
    """The optimizer's learning rate times a function of the fleet's tokens; step it with "interval": "step".

    Args:
        optimizer: whose rates are set.
        factor: from tokens (or samples, where the run counts those) to a factor of the rate.
        trainer: whose strategy knows the tokens.

    Raises:
        ConfigError: the trainer's strategy is not `decoupled_diloco`.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        if not hasattr(strategy, "fleet_tokens"):
            raise ConfigError(
                f"a schedule by fleet tokens under {type(strategy).__name__}, which knows of no fleet: it needs "
                'Trainer(strategy="decoupled_diloco"); with another strategy use a schedule by steps'
            )
        # As a function, not an attribute: a checkpoint holds the attributes.
        super().__init__(optimizer, lambda _: factor(strategy.fleet_tokens))

    def refresh(self) -> None:
        """Set the rates of the present position, between two steps."""
        for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def warmup_cosine(*, warmup: int, total: int, final: float) -> Callable[[int], float]:
    """A factor that rises linearly from 0 to 1, then falls as a cosine, then stays.

    Args:
        warmup: tokens until it is 1, >= 0.
        total: tokens at which it has reached `final`, > warmup.
        final: 0..1.
    """

    def factor(tokens: int) -> float:
        if tokens < warmup:
            return tokens / warmup
        share = min(1.0, (tokens - warmup) / (total - warmup))
        return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2

    return factor


def refresh_schedules(trainer: pl.Trainer) -> None:
    """The run has been joined: schedules by its tokens take its position."""
    for config in trainer.strategy.lr_scheduler_configs:
        if isinstance(config.scheduler, FleetTokenLR):
            config.scheduler.refresh()


def advance_schedules(trainer: pl.Trainer, run_steps: int) -> str:
    """Begin schedules by steps where the run is, at most at their end.

    Args:
        trainer: about to train from its step 0.
        run_steps: inner steps that one learner of the run has made.

    Returns:
        What was done, to be added to a sentence; "" where there is no such schedule.
    """
    if not (configs := list(_by_steps(trainer))):
        return ""
    if trainer.max_steps < 0:
        return "; schedules by steps begin at their start, because Trainer has no max_steps"
    steps = min(run_steps, trainer.max_steps)
    for config in configs:
        with warnings.catch_warnings():  # torch warns of a schedule that steps before its optimizer
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(steps // _steps_per_update(trainer, config)):
                trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
    return f"; schedules by steps begin at step {steps}, where the run is"


def hold_schedules(trainer: pl.Trainer) -> None:
    """After each step: a schedule by steps that has come to its end stays there, though a late learner goes on."""
    for config in _by_steps(trainer):
        if 0 <= trainer.max_steps <= _num_updates(config.scheduler) * _steps_per_update(trainer, config):
            config.frequency = sys.maxsize


def _num_updates(scheduler: object) -> int:
    """How often it was updated; 0 where it does not say: those of other libraries need not."""
    return max(getattr(each, "last_epoch", 0) for each in (scheduler, *getattr(scheduler, "_schedulers", ())))


def _by_steps(trainer: pl.Trainer) -> Iterator[LRSchedulerConfig]:
    for config in trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else ():
        by_tokens = isinstance(config.scheduler, FleetTokenLR)
        if config.interval == "step" and not config.reduce_on_plateau and not by_tokens:
            yield config


def _steps_per_update(trainer: pl.Trainer, config: LRSchedulerConfig) -> int:
    """Lightning updates a schedule at each `frequency`-th batch, if that is the last one of a step."""
    batches = trainer.accumulate_grad_batches
    return math.lcm(config.frequency, batches) // batches
