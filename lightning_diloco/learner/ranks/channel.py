"""Messages from rank 0 of a learner to all other ranks, with an answer, on a CPU group of their own.

1. Rank 0 sends one message at a time. It calls `tell`, and the other ranks call `hear`. Then all ranks call
   `all_could`. On rank 0, `give` calls `tell` and `all_could`.
2. A long pause between two messages is not an error.
3. A message begins with a frame of fixed size. Most messages fit into it. So a receiver does not need the size of a
   message before it receives it.
4. torch.distributed sends messages between ranks without encryption. Ranks trust each other.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diloco.process.threads import yielding

_FOREVER = timedelta(days=30)
_FRAME_NBYTES = 512
_SIZES_NBYTES = 16  # sizes of the text and of its payload, int64


def patient_group(*, yields: bool = False) -> dist.ProcessGroup:
    """Make a CPU group of all ranks with a timeout of 30 days. All ranks call this at the same time.

    Args:
        yields: the group's threads run at low priority, because gloo's threads look for work a hundred times a second.
            False if training may wait for this group.
    """
    make = partial(dist.new_group, backend="gloo", timeout=_FOREVER)
    return yielding(make) if yields else make()


class Channel:
    """One rank's end of the channel. All ranks make it at the same time, with torch.distributed initialized.

    Args:
        yields: see `patient_group`.

    Attributes:
        rank, size: index of this rank, and number of ranks of the learner.
        group: process group of this channel, also for tensors that a message asks for.
    """

    def __init__(self, *, yields: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = patient_group(yields=yields)
        self._giving = threading.Lock()

    def give(self, order: Mapping[str, Any], meanwhile: Callable[[], object], *, within_s: float = -1.0) -> bool:
        """Have the other ranks carry out an order; returns whether all could. Rank 0, any thread.

        Args:
            order: values that JSON can represent.
            meanwhile: rank 0 calls this while the others work; its exception is raised when they are done.
            within_s: how long to wait for the end of an earlier order; after that, this order is not sent, and False is
                returned. Negative: no limit.
        """
        if not self._giving.acquire(timeout=within_s):
            return False
        try:
            self.tell(order)
            try:
                meanwhile()
            finally:
                all_could = self.all_could(True)
            return all_could
        finally:
            self._giving.release()

    def tell(self, text: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Send a message to the other ranks; `all_could` must follow. Rank 0.

        Args:
            text: values that JSON can represent.
            payload: 1-D uint8 on the host; None: empty.
        """
        said = json.dumps(text).encode()
        sizes = array("q", (len(said), 0 if payload is None else payload.numel())).tobytes()
        sent = torch.frombuffer(bytearray((sizes + said).ljust(_FRAME_NBYTES)), dtype=torch.uint8)
        self._broadcast(sent[:_FRAME_NBYTES], sent[_FRAME_NBYTES:], sent[:0] if payload is None else payload)

    def hear(self) -> tuple[dict[str, Any], Tensor]:
        """Receive the next message and its payload; `all_could` must follow. Ranks other than 0."""
        frame = torch.empty(_FRAME_NBYTES, dtype=torch.uint8)
        self._broadcast(frame)
        size, payload_size = frame[:_SIZES_NBYTES].view(torch.int64).tolist()
        rest, payload = (
            torch.empty(max(0, numel), dtype=torch.uint8)
            for numel in (_SIZES_NBYTES + size - _FRAME_NBYTES, payload_size)
        )
        self._broadcast(rest, payload)
        text = json.loads(torch.cat((frame, rest)).numpy().tobytes()[_SIZES_NBYTES : _SIZES_NBYTES + size])
        assert isinstance(text, dict)
        return text, payload

    def all_could(self, mine: bool) -> bool:
        """Report whether this rank could carry out the last message; returns whether all could. Waits for all ranks."""
        could = torch.tensor([int(mine)])
        dist.all_reduce(could, dist.ReduceOp.MIN, group=self.group)
        return bool(could)

    def close(self) -> None:
        """Destroy the group. Call this when no thread uses it."""
        dist.destroy_process_group(self.group)

    def _broadcast(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(tensor, 0, group=self.group)
