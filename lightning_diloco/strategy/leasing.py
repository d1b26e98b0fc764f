"""The strategy as the one whom data modules ask for leases, and who tells the run what was trained on them.

1. A data module asks when its training loader is made. Before the run is joined nothing can be leased: it makes a
   loader of its own, and is asked again.
2. A batch counts when it goes to the device for a step that is exchanged. In a trial that is taken back it does not.
3. Loaders of users' own are split in fixed parts instead (data.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_diloco.strategy.ranges import RangeLoader, Ranges, SizedRangeLoader

if TYPE_CHECKING:
    from lightning_diloco.runtime.link import Link


class LeasesData(Strategy):
    """Mixin of `DiLoCoHooks`."""

    _link: Link | None
    _leased: RangeLoader | None = None
    _wanted_leases = False

    def lease(
        self, ranges: Ranges, *, batch_size: int, collate: Callable[[torch.Tensor], Any], num_batches: int | None
    ) -> RangeLoader | None:
        """Training data by the run's leases; for data modules, when their training loader is made.

        Args:
            ranges: the data.
            batch_size: samples of a batch.
            collate: makes a batch of samples.
            num_batches: of all the data, for the length of an epoch; None: unknown.

        Returns:
            A loader; its epoch is one part of the data long, of as many parts as were agreed. None: there is no run
            now, this learner has several processes, or the Trainer must not change what is read.
        """
        self._wanted_leases = True
        can_lease = getattr(self._link, "lease", None)
        assert self.lightning_module is not None
        may_change = self.lightning_module.trainer._accelerator_connector.use_distributed_sampler
        if self._link is not None and self._num_processes > 1:
            rank_zero_info(
                f"Leases are for learners of one process. This one has {self._num_processes}: it reads a fixed part of "
                "the training data, and that part is read by nobody while it is away."
            )
            return None
        if can_lease is None or not may_change:
            return None
        self._close_leased()
        parts = getattr(self._link, "data_part", None) or (0, 1)
        desk, options = can_lease(ranges.catalogue), {"batch_size": batch_size, "collate": collate}
        if num_batches is None:
            self._leased = RangeLoader(ranges, desk, **options)
        else:
            share = max(1, num_batches // parts[1])
            self._leased = SizedRangeLoader(ranges, desk, num_batches=share, **options)
        rank_zero_info("The training data are leased from the run, range by range, and follow whoever is there.")
        return self._leased

    @property
    def _num_processes(self) -> int:
        return getattr(self, "world_size", 1)

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
