"""When a whole run ends before its learners have made all their steps.

1. Who sets `trainer.should_stop` while the anchor is validated, such as Lightning's EarlyStopping, means the run: the
   anchor is the model of all. Anything that stops a learner elsewhere means that learner only.
2. So does the learner that sees `max_fleet_tokens` reached.
3. The others hear of it within a second or two, stop as Lightning stops early (after `min_steps`, with a last
   validation), drain, and leave: the run ends as any other.
4. All ranks of a learner stop at the same step: one of them says so when it begins, and nobody waits (`ranks.py`).
5. Who sets `trainer.should_stop` on all ranks after the same batch stops them there, as with Lightning's strategies.
   Who sets it on some, such as by a clock, leaves the others alone with these, which hang or fail; here all stop after
   the next batch. While validating or when an epoch ends, where ranks wait for each other anyway, they agree at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import EarlyStopping

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_diloco.runtime.link import Link
    from lightning_diloco.runtime.ranks import Ranks

log = logging.getLogger(__name__)

COME_S = 3.0


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


class StoppingTogether:
    """One rank's part in rule 5, in one fit.

    Lightning has no hook between the last of the user's and where its loops read `should_stop`, before they validate:
    what they call there is wrapped, until `close`.

    Args:
        trainer: that fits.
        ranks: of this learner.

    Attributes:
        is_put_off: whether this rank wants to stop, and all do after the next step, when they know.
        is_agreed: whether all ranks stop.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self.is_put_off = self.is_agreed = False
        self._loops = trainer.fit_loop.epoch_loop, trainer.fit_loop
        self._of_batch, self._of_epoch = (loop.on_advance_end for loop in self._loops)
        for loop, ours in zip(self._loops, (self._on_batch_end, self._on_epoch_end), strict=True):
            loop.on_advance_end = ours  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the loops as they were; idempotent."""
        for loop in self._loops:
            loop.__dict__.pop("on_advance_end", None)

    def agree_now(self) -> None:
        """Where all ranks are at the same place; waits for them."""
        if not self.is_agreed:
            self.is_agreed = self._ranks.count(self.is_put_off or self._trainer.should_stop) > 0
            self._trainer.should_stop |= self.is_agreed

    def _on_batch_end(self, *args: Any) -> None:
        if self._trainer.should_stop and not self.is_agreed:
            self._ask()
        self._of_batch(*args)

    def _ask(self) -> None:
        """Only who wants to stop waits, for a moment: the others may know nothing of it."""
        self.is_agreed = not self.is_put_off and self._ranks.all_come(COME_S)
        self.is_put_off = not self.is_agreed
        self._trainer.should_stop = self.is_agreed

    def _on_epoch_end(self) -> None:
        self._of_epoch()
        self.agree_now()
