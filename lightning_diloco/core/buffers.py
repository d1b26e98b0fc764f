"""The bytes of a tensor, and a tensor of bytes, without a copy where that is possible."""

from __future__ import annotations

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, read-only and not copied."""
    return tensor.detach().view(torch.uint8).numpy().data.toreadonly()


def tensor_of(data: Buffer, dtype: torch.dtype) -> Tensor:
    """A 1-D tensor of these bytes, copied unless they may be changed; the inverse of `bytes_of`."""
    if not memoryview(data).readonly and memoryview(data).nbytes:
        return torch.frombuffer(data, dtype=dtype)
    copied = torch.empty(memoryview(data).nbytes, dtype=torch.uint8)
    copied.numpy()[:] = memoryview(data).cast("B")  # numpy lets other threads run meanwhile, bytearray() does not
    return copied.view(dtype)
