"""The strategy's part in leased data: data modules ask it for a loader, and it reports the trained batches.

1. A data module asks for a loader in `train_dataloader`. Before the join, nothing can be leased. The data module makes
   its own loader then, and Lightning calls `train_dataloader` again after the join.
2. A batch counts when it is moved to the device for a step that is exchanged; a batch of a tuner's trial does not.
3. A second request for the same data returns the same loader, so that no range stays half read.
4. With several ranks, rank 0 leases for all ranks (rank_batches.py).
5. Of users' own loaders, shuffled ones are leased by their indices (leased_part.py); others are split (split.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_diloco.strategy.data.range_batches import Batches, RangeBatches, RangeLoader, Ranges, SizedRangeLoader
from lightning_diloco.strategy.data.split import order_seed
from lightning_diloco.strategy.fit_holder import HoldsFit


class LeasesData(HoldsFit):
    """Mixin of `DiLoCoHooks`."""

    _leased: RangeLoader | None = None
    _leased_as: tuple[object, ...] = ()
    _leased_whole: int | None = None

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
