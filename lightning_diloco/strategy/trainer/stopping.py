"""When a whole run ends before its learners have made all their steps.

1. Who sets `trainer.should_stop` while the anchor is validated means the run: the anchor is the model of all. So does
   Lightning's EarlyStopping at an epoch's end, its default, if the anchor's validation has logged what it monitors.
   Anything else that stops a learner means that learner only.
2. So does the learner that sees `max_fleet_tokens` reached.
3. The others hear of it within a second or two, stop as Lightning stops early (after `min_steps`, with a last
   validation), drain, and leave: the run ends as any other.
4. All ranks of a learner stop at the same step: one of them says so when it begins, and nobody waits
   (`strategy/backends/ranks.py`).
5. Who sets `trainer.should_stop` on all ranks after the same batch stops them there, as with Lightning's strategies.
   Who sets it on some, such as by a clock, leaves the others alone with these, which hang or fail; here all stop after
   the next batch. While validating or when an epoch ends, where ranks wait for each other anyway, they agree at once.
6. An anchor that has not changed since it was validated last says nothing new: while the syncer is away, or if
   validation is more frequent than exchange. EarlyStopping does not count it as one without improvement, and schedules
   on a plateau wait.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import EarlyStopping

from lightning_diloco.strategy.trainer.losses import validated_metrics

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from lightning_diloco.learner.link import Link
    from lightning_diloco.learner.ranks.group import Ranks

log = logging.getLogger(__name__)

COME_S = 3.0


class Stopping:
    """Watches one fit.

    Args:
        trainer: that fits.
        max_fleet_tokens: ends the run when it is reached; None: nothing does.
        evaluates_anchor: rather than the local parameters.

    Attributes:
        reason: why this learner ends the run; None: it does not.
    """

    def __init__(self, trainer: pl.Trainer, max_fleet_tokens: int | None, evaluates_anchor: bool = True) -> None:
        self._trainer = trainer
        self._max_fleet_tokens = max_fleet_tokens
        self._evaluates_anchor = evaluates_anchor
        self._was_stopping = False
        self._names: frozenset[str] = frozenset()  # of what the anchor's validation has logged
        self._looked_at: dict[int, int] = {}  # by callback or schedule: landings when it looked at the anchor last
        self._frequencies: dict[int, int] = {}  # of schedules on a plateau
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

    def why_all_end(self) -> str | None:
        """Why the whole run ends with this learner; None: it does not. Asked when training is over."""
        if self.reason is None and self._trainer.should_stop:
            self.reason = next((text for text in self._said() if text), None)
        return self.reason

    def validation_starts(self, link: Link) -> None:
        """Whoever stops from now on stops because of the anchor; nobody does because it is as it was."""
        self._was_stopping = self._trainer.should_stop
        if not self._evaluates_anchor:
            return
        for callback in self._early_stopping():
            if (self._is_epoch_end or not callback._check_on_train_epoch_end) and not self._is_news(callback, link):
                callback.wait_count -= 1  # and the check to come adds it again

    def anchor_was_validated(self, link: Link) -> None:
        """See whether somebody wants to stop because of it."""
        self._names = frozenset(validated_metrics(self._trainer))
        if self._trainer.should_stop and not self._was_stopping:
            said = next((text for text in self._said() if text), "a callback stopped at the anchor's validation")
            self.reason = said[:1000]
        for config in self._trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.monitor in self._names:
                self._hold_plateau(config, link)

    def _hold_plateau(self, config: LRSchedulerConfig, link: Link) -> None:
        """Have Lightning pass over this schedule until there is another anchor to judge by."""
        if config.interval == "epoch" and not self._is_epoch_end:
            return
        frequency = self._frequencies.setdefault(id(config), config.frequency)
        config.frequency = frequency if self._is_news(config, link) else sys.maxsize

    def _is_news(self, who: object, link: Link) -> bool:
        """Whether the anchor has changed since this one looked at it last; it does so now."""
        before, self._looked_at[id(who)] = self._looked_at.get(id(who)), link.num_landings
        return before != link.num_landings

    @property
    def _is_epoch_end(self) -> bool:
        return self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    def _early_stopping(self) -> list[EarlyStopping]:
        """Those that judge by what the anchor's validation logs."""
        found = [each for each in self._trainer.early_stopping_callbacks if isinstance(each, EarlyStopping)]
        return [each for each in found if each.monitor in self._names]

    def _said(self) -> list[str | None]:
        """What those have said that stopped now, or when this epoch ended."""
        epoch = self._trainer.current_epoch
        return [each.stopping_reason_message for each in self._early_stopping() if each.stopped_epoch >= epoch - 1]


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
