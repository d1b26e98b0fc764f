"""Sends rows of training data from rank 0 of a learner to all its ranks, some batches before they are needed.

1. Before the first batch, rank 0 sends the shape and dtype of a share. All ranks wait for this.
2. After that, rank 0 sends each batch as soon as it has it. The other ranks start to receive AHEAD batches more than
   they need, so they do not wait for rows that were sent in time. Rank 0 waits only for a rank that is MAX_BEHIND
   batches behind.
3. Rows are sent in order, in one message per batch and rank. Ranks that compute together have the same share.
4. Messages that are still on their way at the end are dropped with the group.

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
    """Return the shares of a batch: share k has every `num_shares`-th row, from row k on."""
    return [rows[share::num_shares] for share in range(num_shares)]


class BatchScatter:
    """One rank's end of the scatter. All ranks make it at the same time, with torch.distributed initialized.

    Args:
        shares: index of each rank's share, 0..num_shares-1.

    Attributes:
        num_shares: number of different shares.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.num_shares = len(set(shares))
        assert set(shares) == set(range(self.num_shares)), "every share needs a rank"
        self._shares = tuple(shares)
        self._channel = Channel()
        self._num = 0
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._like: tuple[list[int], torch.dtype] | None = None

    def give(self, rows: Tensor) -> Tensor:
        """Send the other ranks their rows of a batch. Rank 0.

        Args:
            rows: (num_shares * n, ...), on the host; shape and dtype are the same for all batches.

        Returns:
            Rank 0's rows, (n, ...).
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
        """Return this rank's rows of the next batch, (n, ...). Ranks other than 0."""
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
        """Destroy the group. Call this when no rank uses it."""
        self._channel.close()
        self._under_way.clear()
