"""Which training data this learner reads: the strategy's hooks around `split.py`.

1. How many parts there are is asked before `configure_optimizers`, and before any training loader is made: what follows
   from the length of an epoch (`estimated_stepping_batches`, intervals of validation) is that of a part. Which part it
   is, is known when the run is joined; a loader that was made before is made again then.
2. Learners have slots, which the syncer assigns. With parts, slot s reads part s modulo parts of order s // parts; else
   it reads everything in order s. So one that comes when all parts are given away still has an order of its own. Seeds
   of the orders are the run's.
3. A learner whose samples others read, too, says so once.
4. `val_check_interval=k` counts on over the ends of epochs where a part has fewer than k batches, and the whole more.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_diloco.config import LearnerConfig
from lightning_diloco.errors import DiLoCoError, JoinError, RunOverError
from lightning_diloco.strategy.data.leasing import LeasesData
from lightning_diloco.strategy.data.split import in_own_order, is_at, order_number, order_seed, split

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer

log = logging.getLogger(__name__)


class SplitsData(LeasesData):
    """Mixin of `DiLoCoHooks`."""

    _checkpointer: LearnerCheckpointer | None
    _learner: LearnerConfig
    _parts_ahead: int | None = None
    _preparing_train_loader = False
    _is_share_said = False
    _users_val_check: tuple[int, int] | None = None

    @property
    def data_part(self) -> tuple[int, int] | None:
        """(part, parts) of the training data that this learner reads; None: all of it.

        Before the run is joined, only the number of parts can be known, for their length; the part is 0 then.
        """
        if self._link is not None:
            return self._link.data_part
        return (0, self._parts_ahead) if (self._parts_ahead or 1) > 1 else None

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Schedules may be made for the length of an epoch: it is that of a part."""
        self._ask_parts()
        super().setup_optimizers(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Split training data over learners; validation and test data stay whole."""
        dataloader = super().process_dataloader(dataloader)
        wanted = self._preparing_train_loader and self._trainer._accelerator_connector.use_distributed_sampler
        if not wanted or not wants_link(self._trainer):
            return dataloader
        if self._leased is not None and dataloader is self._leased:
            assert self._checkpointer is not None
            self._checkpointer.data_is_ready(is_at_position=True)  # by the lease table, whatever a checkpoint says
            found, whole = dataloader, self._leased_whole
        else:
            found, whole = self._share(dataloader)
        self._keep_val_interval(sized_len(found), whole)
        return found

    def teardown(self) -> None:
        """What was asked or changed for one fit."""
        self._parts_ahead, self._is_share_said = None, False
        if self._users_val_check is not None:
            self._trainer.val_check_interval, self._trainer.check_val_every_n_epoch = self._users_val_check
            self._users_val_check = None
        super().teardown()

    def _train_loaders_come(self) -> None:
        """The next loaders to be processed are the training loaders."""
        self._generators: list[torch.Generator | None] = []
        if self._link is None:
            self._ask_parts()

    def _ask_parts(self) -> None:
        """How many parts the data has in the run that will be joined; nothing is joined by it."""
        if not wants_link(self._trainer):
            return
        from lightning_diloco.learner.whereabouts import agreed_parts  # the wire and its libraries, needed only here

        parts, error = None, None
        if self.is_global_zero:
            try:
                parts = agreed_parts(self._learner)
            except DiLoCoError as found:
                error = found
        said = (parts, None if error is None else str(error), isinstance(error, RunOverError))
        self._parts_ahead, why, is_over = self.broadcast(said)
        if is_over:
            if self.is_global_zero:
                log.warning("%s", why)
            raise SystemExit(0)  # as in joining
        if why is not None:
            raise error or JoinError(f"rank 0 of this learner could not ask the syncer: {why}")

    def _share(self, loader: object) -> tuple[object, int | None]:
        """What this learner reads of a loader, and the length of the whole."""
        part, parts = self.data_part or (0, 1)
        number, whole = order_number(loader, self._generators), sized_len(loader)
        if self._link is None or self._checkpointer is None:  # only its length is asked for
            return (split(loader, part, parts) if parts > 1 else loader), whole
        link, begins = self._link, self._checkpointer.position
        seed = order_seed(link.data_seed, link.slot // (link.config.data_parts or 1), number)
        if parts > 1:
            found = split(loader, part, parts, begins, seed=seed)
        else:
            found = in_own_order(loader, begins, seed=seed, readers=self._num_readers)
        if not self._is_share_said:
            self._is_share_said = True
            _say_share(link.slot, link.config.data_parts or 1)
        self._checkpointer.data_is_ready(is_at_position=is_at(found, begins))
        return found, whole

    def _keep_val_interval(self, length: int | None, whole: int | None) -> None:
        """Rule 4; Lightning refuses an interval that is longer than an epoch."""
        trainer = self._trainer
        interval, every = getattr(trainer, "val_check_interval", None), trainer.check_val_every_n_epoch
        if length is None or whole is None or not isinstance(interval, int) or every is None:
            return
        length, whole = (
            _parse_num_batches(RunningStage.TRAINING, each, trainer.limit_train_batches) for each in (length, whole)
        )
        if length < interval <= whole:
            self._users_val_check = (interval, every)
            trainer.val_check_interval, trainer.check_val_every_n_epoch = interval * every, None

    def _reload_train_data(self) -> None:
        """Forget a loader that was made before it was known what this learner reads; the fit loop makes it again."""
        self._trainer.fit_loop._combined_loader = None


def wants_link(trainer: pl.Trainer) -> bool:
    """Whether this Trainer is about to take part in a run."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run


def _say_share(slot: int, parts: int) -> None:
    """What others read of the same data.

    Args:
        slot: of this learner.
        parts: of the data.
    """
    if parts > 1 and slot < parts:
        rank_zero_info(
            f"The training data are split in {parts} fixed parts; this learner reads part {slot}. A part whose learner "
            "leaves is read by nobody until another one joins; lightning_diloco.hf.TextData leases its data instead, "
            "to whoever is there."
        )
    elif parts > 1:
        rank_zero_warn(
            f"The training data are split in {parts} parts, and all of them are given to learners: this one reads part "
            f"{slot % parts}, as another learner does, in an order of its own. To give each a part, start the run with "
            "as many parts as there will be learners (diloco syncer --data-parts N)."
        )
    elif slot:
        rank_zero_warn(
            "The training data of this run are not split: all of its learners read all of it, each in an order of its "
            "own where torch shuffles it. To split it, start the syncer with --data-parts N, as many as there will be "
            "learners (diloco run --local N does so), or use data that is leased (lightning_diloco.hf.TextData)."
        )
