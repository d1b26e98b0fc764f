"""Early stopping: decides whether a learner, or the whole run, ends before all steps are made.

1. If `trainer.should_stop` is set while the anchor is validated, the whole run stops, because the anchor is the model
   of all learners. Lightning's EarlyStopping at the end of an epoch, its default, also stops the run if the anchor's
   validation has logged the metric that it monitors. Anything else that stops a learner stops only that learner.
2. A learner that sees `max_fleet_tokens` reached stops the run.
3. The other learners receive this within a second or two. They stop as Lightning stops early (after `min_steps`, with a
   last validation), drain and leave, as at the end of any run.
4. All ranks of a learner stop at the same step. A rank that wants to stop announces it when the step begins, so that no
   rank waits (`strategy/backends/ranks.py`).
5. If `trainer.should_stop` is set on all ranks after the same batch, they stop there, as with Lightning's strategies.
   If it is set on some ranks only (by a clock, for example), Lightning's strategies hang or fail. Here, all ranks stop
   after the next batch. In a validation and at the end of an epoch, ranks wait for each other anyway, and agree at
   once.
6. A validation of an anchor that has not changed since the last one gives no new result. This happens if the syncer
   cannot be reached, or if validation is more frequent than exchange. EarlyStopping does not count it as a validation
   without improvement, and plateau schedules wait.
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
    """Decides when training stops in one fit.

    Args:
        trainer: the Trainer of the fit.
        max_fleet_tokens: tokens of all learners at which the run ends; None: no limit.
        evaluates_anchor: whether validation sees the anchor rather than the local parameters.

    Attributes:
        reason: why this learner ends the run; None if it does not.
    """

    def __init__(self, trainer: pl.Trainer, max_fleet_tokens: int | None, evaluates_anchor: bool = True) -> None:
        self._trainer = trainer
        self._max_fleet_tokens = max_fleet_tokens
        self._evaluates_anchor = evaluates_anchor
        self._was_stopping = False
        self._names: frozenset[str] = frozenset()  # metrics that the anchor's validation has logged
        self._looked_at: dict[int, int] = {}  # landings at the last look, by callback or schedule
        self._frequencies: dict[int, int] = {}  # frequencies of plateau schedules
        self.reason: str | None = None

    def heed(self, link: Link) -> None:
        """Stop after a step if the run is over or its token budget is used up; several ranks agree first (rule 4)."""
        if self._trainer.world_size == 1 and (why := self.verdict(link)) is not None:
            self.stop(why)

    def stop(self, why: str) -> None:
        """Stop after this step."""
        if not self._trainer.should_stop:
            log.info("stopping: %s", why)
            self._trainer.should_stop = True

    def verdict(self, link: Link) -> str | None:
        """Return why training should stop; None if it should not."""
        if link.stopped is not None:
            return f"the run is over ({link.stopped})"
        limit = self._max_fleet_tokens
        if limit is not None and link.fleet_tokens >= limit:
            self.reason = f"max_fleet_tokens={limit} reached"
        return self.reason

    def why_all_end(self) -> str | None:
        """Return why the whole run ends with this learner, when training is over; None if it does not."""
        if self.reason is None and self._trainer.should_stop:
            self.reason = next((text for text in self._said() if text), None)
        return self.reason

    def validation_starts(self, link: Link) -> None:
        """Note whether training stops already, and keep an unchanged anchor from stopping it (rule 6)."""
        self._was_stopping = self._trainer.should_stop
        if not self._evaluates_anchor:
            return
        for callback in self._early_stopping():
            if (self._is_epoch_end or not callback._check_on_train_epoch_end) and not self._is_news(callback, link):
                callback.wait_count -= 1  # the check that follows adds 1 again

    def anchor_was_validated(self, link: Link) -> None:
        """Note whether a callback stops training because of the anchor's validation."""
        self._names = frozenset(validated_metrics(self._trainer))
        if self._trainer.should_stop and not self._was_stopping:
            said = next((text for text in self._said() if text), "a callback stopped at the anchor's validation")
            self.reason = said[:1000]
        for config in self._trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.monitor in self._names:
                self._hold_plateau(config, link)

    def _hold_plateau(self, config: LRSchedulerConfig, link: Link) -> None:
        """Have Lightning skip a plateau schedule until the anchor has changed."""
        if config.interval == "epoch" and not self._is_epoch_end:
            return
        frequency = self._frequencies.setdefault(id(config), config.frequency)
        config.frequency = frequency if self._is_news(config, link) else sys.maxsize

    def _is_news(self, who: object, link: Link) -> bool:
        """Return whether the anchor has changed since this callback or schedule looked at it last."""
        before, self._looked_at[id(who)] = self._looked_at.get(id(who)), link.num_landings
        return before != link.num_landings

    @property
    def _is_epoch_end(self) -> bool:
        return self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    def _early_stopping(self) -> list[EarlyStopping]:
        """Return the EarlyStopping callbacks that monitor a metric of the anchor's validation."""
        found = [each for each in self._trainer.early_stopping_callbacks if isinstance(each, EarlyStopping)]
        return [each for each in found if each.monitor in self._names]

    def _said(self) -> list[str | None]:
        """Return the messages of the callbacks that have stopped now, or at the end of this epoch."""
        epoch = self._trainer.current_epoch
        return [each.stopping_reason_message for each in self._early_stopping() if each.stopped_epoch >= epoch - 1]


class StoppingTogether:
    """One rank's part in rule 5, in one fit.

    Lightning's loops read `should_stop` after the last hook of the user and before they validate. Lightning has no hook
    in between, so the methods that its loops call there are wrapped until `close`.

    Args:
        trainer: the Trainer of the fit.
        ranks: the ranks of this learner.

    Attributes:
        is_put_off: whether this rank wants to stop and waits until all ranks know; they stop after the next step.
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
        """Restore the loops; idempotent."""
        for loop in self._loops:
            loop.__dict__.pop("on_advance_end", None)

    def agree_now(self) -> None:
        """Agree with all ranks whether to stop; all ranks call this at the same place, and it waits for them."""
        if not self.is_agreed:
            self.is_agreed = self._ranks.count(self.is_put_off or self._trainer.should_stop) > 0
            self._trainer.should_stop |= self.is_agreed

    def _on_batch_end(self, *args: Any) -> None:
        if self._trainer.should_stop and not self.is_agreed:
            self._ask()
        self._of_batch(*args)

    def _ask(self) -> None:
        """Wait up to COME_S for the other ranks to stop as well; only a rank that wants to stop waits."""
        self.is_agreed = not self.is_put_off and self._ranks.all_come(COME_S)
        self.is_put_off = not self.is_agreed
        self._trainer.should_stop = self.is_agreed

    def _on_epoch_end(self) -> None:
        self._of_epoch()
        self.agree_now()
