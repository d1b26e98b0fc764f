"""What rank 0 of a learner tells all others, and whether all could do it, on a CPU group of its own.

1. One text at a time: `tell` on rank 0, `hear` on the others; then `all_could` on all of them.
2. Nothing here ends because it was quiet for long.
3. Texts travel as torch.distributed carries everything: between ranks, which trust each other, without encryption.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FOREVER = timedelta(days=30)


def patient_group() -> dist.ProcessGroup:
    """A CPU group of all ranks that outlives any pause; made by all at the same time."""
    return dist.new_group(backend="gloo", timeout=_FOREVER)


class Channel:
    """One rank's end; made by all ranks at the same time, with torch.distributed initialized.

    Attributes:
        group: of this channel, for what a text asks to be sent.
    """

    def __init__(self) -> None:
        self.group = patient_group()

    def tell(self, text: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Rank 0: `all_could` must follow.

        Args:
            text: plain values.
            payload: 1-D uint8 on the host.
        """
        head = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
        body = head[:0] if payload is None else payload
        self._broadcast(torch.tensor([head.numel(), body.numel()]), head, body)

    def hear(self) -> tuple[dict[str, Any], Tensor]:
        """Another rank: the next text and its payload; `all_could` must follow."""
        sizes = torch.empty(2, dtype=torch.int64)
        self._broadcast(sizes)
        head, payload = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
        self._broadcast(head, payload)
        text = json.loads(head.numpy().tobytes())
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
