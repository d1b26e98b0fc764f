"""The strategy's hooks for training data: they give this learner its part of the data, or lease it.

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
6. Data modules that can be leased ask for a loader in `train_dataloader`. Before the join, nothing can be leased. The
   data module makes its own loader then, and Lightning calls `train_dataloader` again after the join. A second request
   for the same data returns the same loader, so that no range stays half read.
7. A leased batch counts when it is moved to the device for a step that is exchanged; a batch of a tuner's trial does
   not. With several ranks, rank 0 leases for all ranks (rank_batches.py).
8. Of users' own loaders, shuffled ones are leased by their indices (leased_part.py); others are split (split.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_diloco.config import LearnerConfig
from lightning_diloco.errors import ConfigError, DiLoCoError, JoinError, RunOverError
from lightning_diloco.strategy.data.leased_part import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    ShuffledRanges,
    can_be_leased,
    lease_instead,
)
from lightning_diloco.strategy.data.range_batches import Batches, RangeBatches, RangeLoader, Ranges, SizedRangeLoader
from lightning_diloco.strategy.data.split import in_own_order, is_at, order_number, order_seed, split

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from lightning_diloco.strategy.fit import DiLoCoFit

log = logging.getLogger(__name__)


class DataHooks(Strategy):
    """Base class of `DiLoCoHooks`: the current fit, and the hooks for training data."""

    _learner: LearnerConfig
    _fit: DiLoCoFit | None = None  # None before and after a fit
    _leased: RangeLoader | None = None
    _leased_as: tuple[object, ...] = ()
    _leased_whole: int | None = None
    _parts_ahead: int | None = None
    _preparing_train_loader = False
    _is_share_said = False
    _users_val_check: tuple[int, int] | None = None

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _joined(self) -> DiLoCoFit | None:
        """The fit while this learner is a member of a run."""
        return self._fit if self._fit is not None and self._fit.is_member else None

    @property
    def _present(self) -> DiLoCoFit:
        assert self._fit is not None, "there is no fit"
        return self._fit

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

    # --- leases --------------------------------------------------------------------------------------------------

    def lease(
        self, ranges: Ranges, *, batch_size: int, collate: Callable[[torch.Tensor], Any], num_batches: int | None
    ) -> RangeLoader | None:
        """Return a loader of leased training data; data modules call this in `train_dataloader`.

        Args:
            ranges: the data.
            batch_size: samples per batch of this process.
            collate: makes a batch from samples.
            num_batches: batches of this size in all the data; None if unknown.

        Returns:
            A loader whose epoch is as long as one part of the data; None if there is no run now, or if the Trainer
            does not allow a strategy to change its loaders (`use_distributed_sampler=False`).
        """
        if (fit := self._joined) is None or not self._may_change_data:
            return None
        _, parts = fit.link.data_part or (0, 1)
        share = None if num_batches is None else max(1, num_batches // (parts * self._num_readers))
        self._leased_whole = num_batches
        return self._lease(ranges, batch_size, collate, share)

    def _lease(
        self, ranges: Ranges, batch_size: int, collate: Callable[[torch.Tensor], Any], num_batches: int | None
    ) -> RangeLoader | None:
        """Return a loader of leased data, with `num_batches` per epoch; None if the link leases nothing."""
        wanted = (ranges.catalogue, batch_size, num_batches)
        if self._leased is not None and self._leased_as == wanted:
            return self._leased
        self._close_leased()
        if (batches := self._leased_batches(ranges, batch_size)) is None:
            return None
        if num_batches is None:
            self._leased = RangeLoader(batches, collate=collate)
        else:
            self._leased = SizedRangeLoader(batches, num_batches=num_batches, collate=collate)
        self._leased_as = wanted
        rank_zero_info("The training data are leased from the run, range by range, by the learners that are there.")
        return self._leased

    def _leased_batches(self, ranges: Ranges, batch_size: int) -> Batches | None:
        """Return the batches of this process; None if the link leases nothing."""
        can_lease = getattr(self._present.link, "lease", None)
        if can_lease is None:
            return None
        return RangeBatches(ranges, can_lease(ranges.catalogue), batch_size=batch_size, seed=self._own_seed)

    @property
    def _own_seed(self) -> int:
        """Seed of the order in which this learner reads without a lease."""
        link = self._present.link
        return order_seed(link.data_seed, link.slot)

    @property
    def _num_readers(self) -> int:
        """Number of processes of this learner that train with different samples."""
        return 1

    @property
    def _may_change_data(self) -> bool:
        """Whether the Trainer allows a strategy to change its loaders."""
        return bool(self._trainer._accelerator_connector.use_distributed_sampler)

    def _note_leased(self, tokens: int | None) -> None:
        """Note that a training batch is moved to the device.

        Args:
            tokens: tokens in the batch; None if it is for a tuner's trial.
        """
        if self._leased is None:
            return
        if tokens is None:
            self._leased.tried()
        else:
            self._leased.trained(tokens)

    def _close_leased(self) -> None:
        if self._leased is not None:
            self._leased.close()
        self._leased = None


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
            f"of {MIN_SAMPLES:,} to {MAX_SAMPLES:,} samples, are leased instead, to the learners that are there."
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
