"""A learner's measurements of itself, which it sends to the syncer with heartbeats and its leave."""

from __future__ import annotations

from lightning_diloco.learner.step_timer import StepTimer
from lightning_diloco.protocol.metric_names import COUNTS_TOKENS, EVAL_LOSS, EXCHANGE_P95, STALL, TRAINER_STEP

RANK_BYTES = "diloco/rank_bytes"


class LearnerMetrics:
    """Mixin of `Link`. The training thread calls its methods.

    Attributes:
        trainer_step: steps of the Trainer, including those before a restart.
        rank_bytes: bytes of memory that exchanging takes, on the rank that needs the most; None: unknown.
    """

    def __init__(self) -> None:
        self._watch = StepTimer()
        self._losses: dict[str, float] = {}
        self._unit: str | None = None
        self.trainer_step = 0
        self.rank_bytes: int | None = None

    def held_up(self, for_s: float) -> None:
        """Count time for which other code of this package held the training thread as stall."""
        self._watch.interrupted()
        self._watch.stall_s += for_s

    def set_eval_loss(self, loss: float) -> None:
        """Set the loss of the anchor that this learner has evaluated."""
        self._losses[EVAL_LOSS] = loss

    def _reported(self) -> dict[str, float]:
        own = {STALL: self._watch.stall_s, EXCHANGE_P95: self._watch.exchange_p95_s, TRAINER_STEP: self.trainer_step}
        counts = {} if self._unit is None else {COUNTS_TOKENS: float(self._unit == "tokens")}
        ranks = {} if self.rank_bytes is None else {RANK_BYTES: float(self.rank_bytes)}
        return {**own, **counts, **self._losses, **ranks}
