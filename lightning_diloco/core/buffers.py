"""Conversion of tensors to bytes and back, without a copy if possible."""

from __future__ import annotations

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, read-only and without a copy."""
    return tensor.detach().view(torch.uint8).numpy().data.toreadonly()


def tensor_of(data: Buffer, dtype: torch.dtype) -> Tensor:
    """Return a 1-D tensor of these bytes; the inverse of `bytes_of`. Read-only bytes are copied."""
    if not memoryview(data).readonly and memoryview(data).nbytes:
        return torch.frombuffer(data, dtype=dtype)
    copied = torch.empty(memoryview(data).nbytes, dtype=torch.uint8)
    copied.numpy()[:] = memoryview(data).cast("B")  # numpy releases the GIL during the copy, bytearray() does not
    return copied.view(dtype)
