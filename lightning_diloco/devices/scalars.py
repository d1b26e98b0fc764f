"""One number that a device is computing, for another thread than training to read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_be_read(number: Tensor) -> Callable[[], float]:
    """Training thread: have this number brought to the host; never waits.

    Args:
        number: of one element. On XLA a sync has made it already (rule 2 of xla.py).

    Returns:
        Waits until it is there, and returns it; for any thread.
    """
    if number.device.type != "cuda":
        return lambda: float(number.cpu())
    # In order with training, whose stream is not that of the thread that reads.
    host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    is_there = torch.cuda.Event()
    is_there.record(torch.cuda.current_stream(number.device))

    def read() -> float:
        is_there.synchronize()
        return float(host)

    return read
