"""When a whole run ends before its learners have made all their steps.

1. Who sets `trainer.should_stop` while the anchor is validated, such as Lightning's EarlyStopping, means the run: the
   anchor is the model of all. Anything that stops a learner elsewhere means that learner only.
2. So does the learner that sees `max_fleet_tokens` reached.
3. The others hear of it within a second or two, stop as Lightning stops early (after `min_steps`, with a last
   validation), drain, and leave: the run ends as any other.
4. All ranks of a learner stop at the same step: rank 0 says so when it begins, and nobody waits (`ranks.py`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import EarlyStopping

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.runtime.link import Link

log = logging.getLogger(__name__)


class Stopping:
    """Watches one fit.

    Args:
        trainer: that fits.
        max_fleet_tokens: ends the run when it is reached; None: nothing does.

    Attributes:
        reason: why this learner ends the run; None: it does not.
    """

    def __init__(self, trainer: pl.Trainer, max_fleet_tokens: int | None) -> None:
        self._trainer = trainer
        self._max_fleet_tokens = max_fleet_tokens
        self._was_stopping = False
        self.reason: str | None = None

    def heed(self, link: Link) -> None:
        """At the end of a step: stop if the run is over, or if its tokens are used up. Several ranks agree first."""
        if self._trainer.world_size == 1 and (why := self.verdict(link)) is not None:
            self.stop(why)

    def stop(self, why: str) -> None:
        """This step was the last."""
        if not self._trainer.should_stop:
            log.info("stopping: %s", why)
            self._trainer.should_stop = True

    def verdict(self, link: Link) -> str | None:
        """Why training should stop; None: it should not."""
        if link.stopped is not None:
            return f"the run is over ({link.stopped})"
        limit = self._max_fleet_tokens
        if limit is not None and link.fleet_tokens >= limit:
            self.reason = f"max_fleet_tokens={limit} reached"
        return self.reason

    def validation_starts(self) -> None:
        """Whoever stops from now on stops because of the anchor."""
        self._was_stopping = self._trainer.should_stop

    def anchor_was_validated(self) -> None:
        """See whether somebody wants to stop because of it."""
        if self._trainer.should_stop and not self._was_stopping:
            callbacks = self._trainer.early_stopping_callbacks
            said = [c.stopping_reason_message for c in callbacks if isinstance(c, EarlyStopping)]
            self.reason = next((text for text in said if text), "a callback stopped at the anchor's validation")[:1000]
