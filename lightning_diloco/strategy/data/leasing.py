"""The strategy as the one whom data modules ask for leases, and who tells the run what was trained on them.

1. A data module asks when its training loader is made. Before the run is joined nothing can be leased: it makes a
   loader of its own, and is asked again.
2. A batch counts when it goes to the device for a step that is exchanged. In a trial that is taken back it does not.
3. Asked again for the same, it gives the same loader: no range that was begun is left behind.
4. Of several ranks, the first leases for all (rank_batches.py).
5. Loaders of users' own are split in fixed parts instead (split.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_diloco.strategy.data.range_batches import Batches, RangeBatches, RangeLoader, Ranges, SizedRangeLoader
from lightning_diloco.strategy.data.split import order_seed

if TYPE_CHECKING:
    from lightning_diloco.learner.link import Link


class LeasesData(Strategy):
    """Mixin of `DiLoCoHooks`."""

    _link: Link | None
    _leased: RangeLoader | None = None
    _leased_as: tuple[object, ...] = ()
    _leased_whole: int | None = None

    def lease(
        self, ranges: Ranges, *, batch_size: int, collate: Callable[[torch.Tensor], Any], num_batches: int | None
    ) -> RangeLoader | None:
        """Training data by the run's leases; for data modules, when their training loader is made.

        Args:
            ranges: the data.
            batch_size: samples of a batch of this process.
            collate: makes a batch of samples.
            num_batches: of this size in all the data, for the length of an epoch; None: unknown.

        Returns:
            A loader; its epoch is one part of the data long, of as many parts as were agreed. None: there is no run
            now, or the Trainer must not change what is read.
        """
        if self._link is None or not self._may_change_data:
            return None
        wanted = (ranges.catalogue, batch_size, num_batches)
        if self._leased is not None and self._leased_as == wanted:
            return self._leased
        self._close_leased()
        if (batches := self._leased_batches(ranges, batch_size)) is None:
            return None
        _, parts = self._link.data_part or (0, 1)
        if num_batches is None:
            self._leased = RangeLoader(batches, collate=collate)
        else:
            share = max(1, num_batches // (parts * self._num_readers))
            self._leased = SizedRangeLoader(batches, num_batches=share, collate=collate)
        self._leased_as, self._leased_whole = wanted, num_batches
        rank_zero_info("The training data are leased from the run, range by range, and follow whoever is there.")
        return self._leased

    def _leased_batches(self, ranges: Ranges, batch_size: int) -> Batches | None:
        """Batches of this process; None: the link leases nothing."""
        can_lease = getattr(self._link, "lease", None)
        if can_lease is None:
            return None
        return RangeBatches(ranges, can_lease(ranges.catalogue), batch_size=batch_size, seed=self._own_seed)

    @property
    def _own_seed(self) -> int:
        """Of what this learner reads without a lease."""
        assert self._link is not None
        return order_seed(self._link.data_seed, self._link.slot)

    @property
    def _num_readers(self) -> int:
        """How many processes of this learner train with different samples."""
        return 1

    @property
    def _may_change_data(self) -> bool:
        """Whether the Trainer lets a strategy choose what is read."""
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer._accelerator_connector.use_distributed_sampler)

    def _note_leased(self, tokens: int | None) -> None:
        """A training batch goes to the device; None: for a trial."""
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
