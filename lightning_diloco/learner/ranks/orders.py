"""What rank 0 of a learner has the other ranks do beside everything else, on a CPU group of its own.

1. One order at a time, from one thread of each rank: `give` on rank 0, `take` and `answer` on the others.
2. Whoever gives an order does its own share meanwhile. An order is done when all ranks have done theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_diloco.learner.ranks.channel import Channel
from lightning_diloco.transport.base import Json


class Orders:
    """One rank's end; made by all ranks at the same time, with torch.distributed initialized.

    Attributes:
        rank, size: in the learner.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._channel = Channel(yields=True)
        self._giving = threading.Lock()

    def give(self, order: Json, meanwhile: Callable[[], object], *, within_s: float = -1.0) -> bool:
        """Rank 0: have the others do this; returns whether all could.

        Args:
            order: plain values.
            meanwhile: what rank 0 does; what it raises is raised when the others are done.
            within_s: how long to wait for an order before this one; then it is not given. Negative: for ever.
        """
        if not self._giving.acquire(timeout=within_s):
            return False
        try:
            self._channel.tell(order)
            try:
                meanwhile()
            finally:
                all_could = self._channel.all_could(True)
            return all_could
        finally:
            self._giving.release()

    def take(self) -> Json:
        """Another rank: the next order; `answer` must follow."""
        return self._channel.hear()[0]

    def answer(self, could: bool) -> None:
        """Another rank: its share of the order that was taken last is done, or could not be."""
        self._channel.all_could(could)

    def close(self) -> None:
        """End the group, when no thread uses it any more."""
        self._channel.close()
