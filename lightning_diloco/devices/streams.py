"""Streams, events and pinned memory of an accelerator, through the module that torch has for its type.

1. A type has side streams if its module can make one current and tell whether its work is done. Work of different
   streams then runs at the same time, and events order it.
2. All other types have one queue: Apple's have no streams, those of TorchTPU do nothing and cannot be queried. Work is
   then in order by itself, and waiting for a result means waiting for all work before it.
3. If memory cannot be pinned, host transfers block the calling thread.
4. A warning says once for each type what it lacks.
5. Nothing needs float64 on the device, which some types do not have.

No type is named here, so a new one needs no code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Streams:
    """Streams, events and pinned memory of one accelerator, for work in parallel with training.

    Args:
        device: the accelerator.

    Attributes:
        has_side_streams: whether work on another stream runs in parallel with training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self.has_side_streams = _has_side_streams(device.type)
        self._can_pin = _can_pin(device.type)

    def side(self) -> Any:
        """Return a new stream for work in parallel with training; None without side streams."""
        return self._module.Stream(self._device) if self.has_side_streams else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which this stream is the thread's current one."""
        return nullcontext() if stream is None else self._module.stream(stream)

    def synchronize(self, stream: Any) -> None:
        """Make the host wait for the work of this stream; without side streams, for all work."""
        if stream is None:
            torch.accelerator.synchronize()
        else:
            stream.synchronize()

    def recorded(self) -> Any:
        """Return an event at the end of the current stream's work; None without side streams."""
        if not self.has_side_streams:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event; the host does not wait."""
        self._module.current_stream(self._device).wait_event(event)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host. A copy to pinned memory is complete when the current stream is synchronized."""
        if not self._can_pin:
            return tensor.cpu()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def from_host(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device. A copy from pinned memory is part of the current stream."""
        if not self._can_pin:
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


def to_be_read(number: Tensor) -> Callable[[], float]:
    """Start the copy of a scalar to the host; never waits. Training thread.

    Args:
        number: tensor of one element. On XLA, a sync must already have materialized it (rule 2 of devices/xla/ops.py).

    Returns:
        A function, callable from any thread, that waits for the value and returns it.
    """
    if number.device.type == "cpu":
        value = float(number)  # training may change the number before it is read
        return lambda: value
    if number.device.type == "xla":
        return lambda: float(number.cpu())
    streams = Streams(number.device)
    if not streams.has_side_streams:
        kept = number.detach().clone()
        return lambda: float(kept.cpu())
    # The copy runs on the training stream; the reading thread has a different current stream.
    host = streams.to_host(number)
    is_there = streams.recorded()

    def read() -> float:
        is_there.synchronize()
        return float(host)

    return read


@cache
def _has_side_streams(kind: str) -> bool:
    module = torch.get_device_module(kind)
    try:
        before, side = module.current_stream(), module.Stream()
        with module.stream(side):
            found = bool(module.current_stream() == side != before)
        side.query()
    except (AttributeError, NotImplementedError, RuntimeError):  # streams that do nothing refuse some of these calls
        found = False
    if not found:
        log.warning("devices of type %s have one queue here: exchanges run in order with training and delay it", kind)
    return found


@cache
def _can_pin(kind: str) -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("host memory cannot be pinned for %s (%s): copies from and to the device block", kind, reason)
        return False
    return True
