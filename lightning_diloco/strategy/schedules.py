"""Learning rates by the tokens that the whole fleet has seen, wherever a learner stands itself.

1. Tokens of others are those that the syncer told last, about a second ago; a learner's own are exact. While it is
   offline its own go on counting.
2. A learner that joins late starts where the run is: its first step has the rate of the run's present position.
3. All ranks of a learner have one rate: rank 0 tells the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl


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
        super().__init__(optimizer, lambda _: factor(strategy.broadcast(strategy.fleet_tokens)))

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
