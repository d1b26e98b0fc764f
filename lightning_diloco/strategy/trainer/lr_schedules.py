"""Learning rate schedules in a run: by the tokens of the fleet, or by a learner's own steps.

By tokens that the whole fleet has seen:

1. A learner's own tokens are exact; those of others are about a second old, as the syncer has sent them. While the
   syncer cannot be reached, the learner's own tokens go on counting.
2. A learner that joins late starts at the run's present position.
3. All ranks of a learner have the same rate. It depends on the tokens at the start of the step, which rank 0 sends.

By steps (any scheduler with "interval": "step"):

4. A learner that joins late continues from a checkpoint, its schedule included. Without a checkpoint, the schedule
   begins at the run's position in steps of one learner: merged periods times `sync_every`. This is at most one period
   too small.
5. `max_steps` counts a learner's own steps, late or not. Schedules are expected to end there, and keep their last rate
   from there on. Without `max_steps`, their end is unknown, and they begin at their start.
6. Schedules by epochs, plateau schedules and schedules under manual optimization are left to the user. In a learner
   that joins late without a checkpoint, they begin at their start. If its rate is then more than ten times the others',
   its contributions are refused (`syncer/norm_guard.py`).
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
        optimizer: the optimizer.
        factor: maps tokens (or samples, if the run counts samples) to a factor of the rate.
        trainer: the Trainer, whose strategy knows the tokens.

    Raises:
        ConfigError: the trainer's strategy is not `decoupled_diloco`.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        if not hasattr(strategy, "fleet_tokens"):
            raise ConfigError(
                f"a schedule by fleet tokens under {type(strategy).__name__}, which has no fleet: it needs "
                'Trainer(strategy="decoupled_diloco"); with another strategy use a schedule by steps'
            )
        # The strategy is no attribute, because a checkpoint holds the scheduler's attributes.
        super().__init__(optimizer, lambda _: factor(strategy.fleet_tokens))

    def refresh(self) -> None:
        """Set the rates for the present position, between two steps."""
        for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * factor(self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def warmup_cosine(*, warmup: int, total: int, final: float) -> Callable[[int], float]:
    """Return a factor that rises linearly from 0 to 1, falls as a cosine to `final`, and stays there.

    Args:
        warmup: tokens at which it reaches 1, >= 0.
        total: tokens at which it reaches `final`, > warmup.
        final: the last factor, 0..1.
    """

    def factor(tokens: int) -> float:
        if tokens < warmup:
            return tokens / warmup
        share = min(1.0, (tokens - warmup) / (total - warmup))
        return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2

    return factor


def refresh_schedules(trainer: pl.Trainer) -> None:
    """Set schedules by tokens to the position of the run, which has been joined."""
    for config in trainer.strategy.lr_scheduler_configs:
        if isinstance(config.scheduler, FleetTokenLR):
            config.scheduler.refresh()


def advance_schedules(trainer: pl.Trainer, run_steps: int) -> str:
    """Advance schedules by steps to the run's position, at most to their end.

    Args:
        trainer: a Trainer that is about to train from step 0.
        run_steps: inner steps that one learner of the run has made.

    Returns:
        The end of a sentence that says what was done, also with schedules by epochs; "" if there are no schedules.
    """
    by_epochs = any(config.interval == "epoch" and not config.reduce_on_plateau for config in _automatic(trainer))
    return _advance_by_steps(trainer, run_steps) + (
        "; schedules by epochs begin at their start, so that its rate may be too high for the run" if by_epochs else ""
    )


def _advance_by_steps(trainer: pl.Trainer, run_steps: int) -> str:
    if not (configs := list(_by_steps(trainer))):
        return ""
    if trainer.max_steps < 0:
        return "; schedules by steps begin at their start, because Trainer has no max_steps"
    steps = min(run_steps, trainer.max_steps)
    for config in configs:
        with warnings.catch_warnings():  # torch warns if a schedule steps before its optimizer
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(steps // _steps_per_update(trainer, config)):
                trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
    return f"; schedules by steps begin at step {steps}, where the run is"


def hold_schedules(trainer: pl.Trainer) -> None:
    """Stop schedules by steps at their end, although a late learner goes on; called after each step."""
    for config in _by_steps(trainer):
        if 0 <= trainer.max_steps <= _num_updates(config.scheduler) * _steps_per_update(trainer, config):
            config.frequency = sys.maxsize


def _num_updates(scheduler: object) -> int:
    """Return how often a scheduler was updated; 0 if it does not count, as in other libraries."""
    return max(getattr(each, "last_epoch", 0) for each in (scheduler, *getattr(scheduler, "_schedulers", ())))


def _by_steps(trainer: pl.Trainer) -> Iterator[LRSchedulerConfig]:
    for config in _automatic(trainer):
        by_tokens = isinstance(config.scheduler, FleetTokenLR)
        if config.interval == "step" and not config.reduce_on_plateau and not by_tokens:
            yield config


def _automatic(trainer: pl.Trainer) -> list[LRSchedulerConfig]:
    """Return the schedules that Lightning updates."""
    return trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else []


def _steps_per_update(trainer: pl.Trainer, config: LRSchedulerConfig) -> int:
    """Return the steps between two updates.

    Lightning updates at each `frequency`-th batch that is the last batch of a step.
    """
    batches = trainer.accumulate_grad_batches
    return math.lcm(config.frequency, batches) // batches
