"""Batches of a learner with several ranks: rank 0 cuts them and scatters the rows to the ranks.

1. A batch of the learner has the rows that all ranks train at once. Rank r of `size` takes every `size`-th row from the
   r-th on. So all ranks make the same number of batches, and one number says how much of a range was trained.
2. Only rank 0 holds leases. It cuts a few batches in advance. If the syncer takes their leases back meanwhile, the
   ranks still train them, and they count as repeated.
3. While it cuts batches in advance, rank 0 neither waits for a lease nor reads without one.

Source: our choice. Ranks could read ranges by themselves, but each would have to read all of a text that is packed on
the fly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lightning_diloco.learner.ranks.scatter_batches import AHEAD, BatchScatter
from lightning_diloco.protocol.data_ranges import Piece
from lightning_diloco.strategy.data.range_batches import Batch, RangeBatches


class RankBatches:
    """The batches of one rank.

    Args:
        batches: rank 0: batches of all ranks; None on other ranks.
        handout: scatters the rows from rank 0 to the other ranks.
    """

    def __init__(self, batches: RangeBatches | None, handout: BatchScatter) -> None:
        self._batches, self._handout = batches, handout
        self._ahead: deque[Batch] = deque()

    def next(self) -> Batch:
        """Return this rank's rows of the next batch; on rank 0 also the pieces of all ranks, elsewhere none."""
        if self._batches is None:
            return self._handout.take(), ()
        if not self._ahead:
            self._hand_out(self._batches.next())
        while len(self._ahead) <= AHEAD and (batch := self._batches.next_if_there()) is not None:
            self._hand_out(batch)
        return self._ahead.popleft()

    def trained(self, pieces: Iterable[Piece]) -> None:
        """Count the pieces of all ranks for the present step; only rank 0 counts."""
        if self._batches is not None:
            self._batches.trained(pieces)

    def close(self) -> None:
        """End the reading thread, if there is one."""
        if self._batches is not None:
            self._batches.close()

    def _hand_out(self, batch: Batch) -> None:
        rows, pieces = batch
        self._ahead.append((self._handout.give(rows), pieces))
