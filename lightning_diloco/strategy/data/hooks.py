"""The strategy's hooks for training data: they give this learner its part of the data (split.py, leased_part.py).

1. Rank 0 asks for the number of parts before `configure_optimizers` and before a training loader is made. So values
   that depend on the length of an epoch (`estimated_stepping_batches`, intervals of validation) fit a part. The number
   of this learner's part is known after the join; a loader that was made earlier is made again then.
2. The syncer gives each learner a slot. If the data has parts, slot s reads part s % parts in order s // parts;
   otherwise it reads everything in order s. So a learner that joins when every part is taken has its own order. The
   seeds of the orders belong to the run.
3. If other learners read the same samples, this learner logs it once.
4. If the Trainer makes its loaders again during the fit, their data may change, so they are not leased.
5. If a part has fewer batches than `val_check_interval`, and the whole has at least as many, validation batches are
   counted across the ends of epochs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_diloco.config import LearnerConfig
from lightning_diloco.errors import ConfigError, DiLoCoError, JoinError, RunOverError
from lightning_diloco.strategy.data.leased_part import MIN_SAMPLES, ShuffledRanges, can_be_leased, lease_instead
from lightning_diloco.strategy.data.leasing import LeasesData
from lightning_diloco.strategy.data.split import in_own_order, is_at, order_number, order_seed, split

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

log = logging.getLogger(__name__)


class SplitsData(LeasesData):
    """Mixin of `DiLoCoHooks`."""

    _learner: LearnerConfig
    _parts_ahead: int | None = None
    _preparing_train_loader = False
    _is_share_said = False
    _users_val_check: tuple[int, int] | None = None

    @property
    def data_part(self) -> tuple[int, int] | None:
        """(part, parts) of the training data that this learner reads; None: all of it.

        Before the join, the part is 0; only the number of parts can be known, which determines their length.
        """
        if (fit := self._joined) is not None:
            return fit.link.data_part
        return (0, self._parts_ahead) if (self._parts_ahead or 1) > 1 else None

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Ask for the number of parts first: schedules may depend on the length of an epoch."""
        self._ask_parts()
        super().setup_optimizers(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Split a training loader over the learners; loaders for validation and test stay whole."""
        dataloader = super().process_dataloader(dataloader)
        wanted = self._preparing_train_loader and self._trainer._accelerator_connector.use_distributed_sampler
        if not wanted or not wants_link(self._trainer):
            return dataloader
        if self._leased is not None and dataloader is self._leased:
            self._present.checkpointer.data_is_ready(is_at_position=True)  # leases determine the position
            found, whole = dataloader, self._leased_whole
        else:
            found, whole = self._share(dataloader)
        if sized_len(found) == 0 and whole:
            raise ConfigError(
                f"the training data has {whole} batch(es), and none is left in this learner's part of it: a part has "
                "fewer samples than a batch, and drop_last=True leaves it out. Use fewer learners, smaller batches, or "
                "drop_last=False"
            )
        self._keep_val_interval(sized_len(found), whole)
        return found

    @override
    def teardown(self) -> None:
        """Forget the number of parts, and restore the Trainer's options."""
        self._parts_ahead, self._is_share_said = None, False
        if self._users_val_check is not None:
            self._trainer.val_check_interval, self._trainer.check_val_every_n_epoch = self._users_val_check
            self._users_val_check = None
        super().teardown()

    def _train_loaders_come(self) -> None:
        """Prepare for the training loaders, which Lightning processes next."""
        self._generators: list[torch.Generator | None] = []
        if self._joined is None:
            self._ask_parts()

    def _ask_parts(self) -> None:
        """Ask the syncer for the number of parts, without joining the run."""
        if not wants_link(self._trainer):
            return
        from lightning_diloco.learner.whereabouts import agreed_parts  # imports pyarrow, which only a fit needs

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
            raise SystemExit(0)  # as in `DiLoCoFit.join`
        if why is not None:
            raise error or JoinError(f"rank 0 of this learner could not ask the syncer: {why}")

    def _share(self, loader: object) -> tuple[object, int | None]:
        """Return the part of a loader that this learner reads, and the length of the whole loader."""
        part, parts = self.data_part or (0, 1)
        number, whole = order_number(loader, self._generators), sized_len(loader)
        if (fit := self._joined) is None:  # Lightning only needs its length
            return (split(loader, part, parts) if parts > 1 else loader), whole
        link, begins = fit.link, fit.checkpointer.position
        seed = order_seed(link.data_seed, link.slot // (link.config.data_parts or 1), number)
        if parts > 1:
            found = split(loader, part, parts, begins, seed=seed)
        else:
            found = in_own_order(loader, begins, seed=seed, readers=self._num_readers)
        fit.checkpointer.data_is_ready(is_at_position=is_at(found, begins))
        is_made_again = self._trainer.reload_dataloaders_every_n_epochs > 0
        if parts > 1 and not is_made_again and can_be_leased(found):
            return lease_instead(found, partial(self._lease_only, order_seed(link.data_seed, 0, number))), whole
        if found is not loader:  # otherwise it could not be split, and a warning has said so
            self._say_share()
        return found, whole

    def _lease_only(self, seed: int, loader: DataLoader[object]) -> Iterable[list[int]] | None:
        """Return leased batches of the samples of a loader, if it is the only one; None: it keeps its part.

        Args:
            seed: seed of the order of all samples.
            loader: the loader, split.
        """
        loaders = self._trainer.fit_loop._combined_loader
        if loaders is not None and len(loaders.flattened) == 1:
            ranges = ShuffledRanges(loader.sampler.whole, seed)
            leased = self._lease(ranges, loader.batch_sampler.batch_size, torch.Tensor.tolist, len(loader))
            if leased is not None:
                return leased
        self._say_share()
        return None

    def _say_share(self) -> None:
        """Log once whether other learners read the same data."""
        if not self._is_share_said:
            self._is_share_said = True
            link = self._present.link
            _say_share(link.slot, link.config.data_parts or 1)

    def _keep_val_interval(self, length: int | None, whole: int | None) -> None:
        """Apply rule 5, because Lightning refuses an interval that is longer than an epoch."""
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
        """Drop a loader that was made before the join; the fit loop makes it again."""
        self._trainer.fit_loop._combined_loader = None


def wants_link(trainer: pl.Trainer) -> bool:
    """Return whether this Trainer takes part in a run: it fits, and not as a fast_dev_run."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run


def _say_share(slot: int, parts: int) -> None:
    """Log whether other learners read the same data.

    Args:
        slot: slot of this learner.
        parts: number of parts of the data.
    """
    if parts > 1 and slot < parts:
        rank_zero_info(
            f"The training data are split in {parts} fixed parts; this learner reads part {slot}. A part whose learner "
            "leaves is not read until another learner joins. lightning_diloco.hf.TextData, and one shuffled DataLoader "
            f"of {MIN_SAMPLES} samples or more, are leased instead, to the learners that are there."
        )
    elif parts > 1:
        rank_zero_warn(
            f"There are more learners than parts of the training data ({parts}). This learner reads part "
            f"{slot % parts} like another learner, in a different order. To avoid this, start the syncer with "
            "--data-parts N, N being the number of learners."
        )
    elif slot:
        rank_zero_warn(
            "The training data of this run are not split: all of its learners read all of it, each in an order of its "
            "own where torch shuffles it. To split it, start the syncer with --data-parts N, as many as there will be "
            "learners (diloco run --local N does so), or use data that is leased (lightning_diloco.hf.TextData)."
        )
