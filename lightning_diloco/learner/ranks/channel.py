"""What rank 0 of a learner tells all others, and whether all could do it, on a CPU group of its own.

1. One text at a time: `tell` on rank 0, `hear` on the others; then `all_could` on all of them. `give` is the first and
   the last of these.
2. Nothing here ends because it was quiet for long.
3. A text begins with a frame of a known size, which most texts fit in whole: who hears need not be told a size first.
4. Texts travel as torch.distributed carries everything: between ranks, which trust each other, without encryption.
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
_SIZES_NBYTES = 16  # of the text and of its payload, int64


def patient_group(*, yields: bool = False) -> dist.ProcessGroup:
    """A CPU group of all ranks that outlives any pause; made by all at the same time.

    Args:
        yields: cores that are short to training; not where training may wait for this group. gloo's threads look for
            something to do a hundred times a second.
    """
    make = partial(dist.new_group, backend="gloo", timeout=_FOREVER)
    return yielding(make) if yields else make()


class Channel:
    """One rank's end; made by all ranks at the same time, with torch.distributed initialized.

    Args:
        yields: see `patient_group`.

    Attributes:
        rank, size: in the learner.
        group: of this channel, for what a text asks to be sent.
    """

    def __init__(self, *, yields: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = patient_group(yields=yields)
        self._giving = threading.Lock()

    def give(self, order: Mapping[str, Any], meanwhile: Callable[[], object], *, within_s: float = -1.0) -> bool:
        """Rank 0: have the others do this; returns whether all could. Any thread.

        Args:
            order: plain values.
            meanwhile: what rank 0 does; what it raises is raised when the others are done.
            within_s: how long to wait for an order before this one; then it is not given. Negative: for ever.
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
        """Rank 0: `all_could` must follow.

        Args:
            text: plain values.
            payload: 1-D uint8 on the host.
        """
        said = json.dumps(text).encode()
        sizes = array("q", (len(said), 0 if payload is None else payload.numel())).tobytes()
        sent = torch.frombuffer(bytearray((sizes + said).ljust(_FRAME_NBYTES)), dtype=torch.uint8)
        self._broadcast(sent[:_FRAME_NBYTES], sent[_FRAME_NBYTES:], sent[:0] if payload is None else payload)

    def hear(self) -> tuple[dict[str, Any], Tensor]:
        """Another rank: the next text and its payload; `all_could` must follow."""
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
        """Say whether this rank could do what the last text asks for; returns whether all could. Waits for all."""
        could = torch.tensor([int(mine)])
        dist.all_reduce(could, dist.ReduceOp.MIN, group=self.group)
        return bool(could)

    def close(self) -> None:
        """End the group, when no thread uses it any more."""
        dist.destroy_process_group(self.group)

    def _broadcast(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(tensor, 0, group=self.group)
