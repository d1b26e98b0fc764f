"""Reading of a device scalar from another thread than the training thread."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_be_read(number: Tensor) -> Callable[[], float]:
    """Start the copy of a scalar to the host; never waits. Training thread.

    Args:
        number: tensor of one element. On XLA, a sync must already have materialized it (rule 2 of devices/xla/ops.py).

    Returns:
        A function, callable from any thread, that waits for the value and returns it.
    """
    if number.device.type != "cuda":
        return lambda: float(number.cpu())
    # The copy runs on the training stream; the reading thread has a different current stream.
    host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    is_there = torch.cuda.Event()
    is_there.record(torch.cuda.current_stream(number.device))

    def read() -> float:
        is_there.synchronize()
        return float(host)

    return read
