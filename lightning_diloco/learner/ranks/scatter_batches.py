"""Rows of training data from rank 0 of a learner to all its ranks, some batches before they are needed.

1. What a row looks like is told once, before the first batch; all ranks wait for that.
2. From then on rank 0 sends when it has a batch, and the others listen for AHEAD batches more than they need. Nobody
   waits for what was sent in time; rank 0 waits only for a rank that is MAX_BEHIND batches behind.
3. Rows go in order, one message for each batch and rank. Ranks that compute together have the same share.
4. What is still under way at the end goes down with the group.

Source: our choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diloco.learner.ranks.channel import Channel

AHEAD = 2
MAX_BEHIND = 64
_NUM_TAGS = 1 << 20


def deal(rows: Tensor, num_shares: int) -> list[Tensor]:
    """Every `num_shares`-th row, from each of the first ones on."""
    return [rows[share::num_shares] for share in range(num_shares)]


class BatchScatter:
    """One rank's end; made by all ranks at the same time, with torch.distributed initialized.

    Args:
        shares: by rank, 0..num_shares-1.

    Attributes:
        num_shares: different ones.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.num_shares = len(set(shares))
        assert set(shares) == set(range(self.num_shares)), "every share is somebody's"
        self._shares = tuple(shares)
        self._channel = Channel()
        self._num = 0
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._like: tuple[list[int], torch.dtype] | None = None

    def give(self, rows: Tensor) -> Tensor:
        """Rank 0: send all others their rows of a batch.

        Args:
            rows: (num_shares * n, ...), on the host; n and the rest are the same every time.

        Returns:
            Its own (n, ...).
        """
        parts = deal(rows, self.num_shares)
        if self._like is None:
            self._like = list(parts[0].shape), rows.dtype
            self._channel.tell({"shape": self._like[0], "dtype": str(rows.dtype).removeprefix("torch.")})
            self._channel.all_could(True)
        assert all((list(part.shape), part.dtype) == self._like for part in parts), "batches are alike"
        for rank, share in enumerate(self._shares[1:], start=1):
            part = parts[share].contiguous()
            work = dist.isend(part, rank, group=self._channel.group, tag=self._num % _NUM_TAGS)
            assert work is not None
            self._under_way.append((work, part))
        self._num += 1
        while len(self._under_way) > MAX_BEHIND * (len(self._shares) - 1):
            self._under_way.popleft()[0].wait()
        return parts[self._shares[0]]

    def take(self) -> Tensor:
        """Another rank: its rows (n, ...) of the next batch."""
        if self._like is None:
            text, _ = self._channel.hear()
            self._channel.all_could(True)
            self._like = text["shape"], getattr(torch, text["dtype"])
        shape, dtype = self._like
        while len(self._under_way) <= AHEAD:
            rows = torch.empty(shape, dtype=dtype)
            work = dist.irecv(rows, 0, group=self._channel.group, tag=self._num % _NUM_TAGS)
            assert work is not None
            self._under_way.append((work, rows))
            self._num += 1
        work, rows = self._under_way.popleft()
        work.wait()
        return rows

    def close(self) -> None:
        """End the group, when all ranks are done with it."""
        self._channel.close()
        self._under_way.clear()
