"""Batches of a learner with several ranks: rank 0 cuts them for all, and hands each rank its rows.

1. A batch of the learner is as many rows as its ranks train with at once. Rank r of `size` takes every `size`-th of
   them, from the r-th on: all make the same number of batches, wherever ranges end, and how far the learner is with a
   range is one number.
2. Only rank 0 knows of leases. It cuts some batches ahead of need; what is taken from the learner meanwhile, all ranks
   still train with, and it counts as repeated.
3. Ahead of need nothing is waited for, and nothing is read without a lease.

Source: our choice. Every rank could read ranges for itself; but what is packed as it comes, each would have to read all
of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lightning_diloco.learner.ranks.scatter_batches import AHEAD, BatchScatter
from lightning_diloco.protocol.data_ranges import Piece
from lightning_diloco.strategy.data.range_batches import Batch, RangeBatches


class RankBatches:
    """One rank's `Batches`.

    Args:
        batches: rank 0: of all ranks.
        handout: from rank 0 to the others.
    """

    def __init__(self, batches: RangeBatches | None, handout: BatchScatter) -> None:
        self._batches, self._handout = batches, handout
        self._ahead: deque[Batch] = deque()

    def next(self) -> Batch:
        """This rank's rows of the next batch, and what all ranks' rows are of, which rank 0 alone knows."""
        if self._batches is None:
            return self._handout.take(), ()
        if not self._ahead:
            self._hand_out(self._batches.next())
        while len(self._ahead) <= AHEAD and (batch := self._batches.next_if_there()) is not None:
            self._hand_out(batch)
        return self._ahead.popleft()

    def trained(self, pieces: Iterable[Piece]) -> None:
        """All ranks' share of the step that is being computed; rank 0 says it for all."""
        if self._batches is not None:
            self._batches.trained(pieces)

    def close(self) -> None:
        """End the reading thread, where there is one."""
        if self._batches is not None:
            self._batches.close()

    def _hand_out(self, batch: Batch) -> None:
        rows, pieces = batch
        self._ahead.append((self._handout.give(rows), pieces))
