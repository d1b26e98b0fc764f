"""Loads the kernels of `fused_kernels.py`, if a GPU can use them.

Triton is optional. It comes with torch for CUDA. With or without it all results have the same bits; torch makes a pass
over memory for each operation, a kernel makes one.

Source: our choice.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

log = logging.getLogger(__name__)

DEVICES = frozenset({"cuda"})


def kernels_for(x: Tensor, bits: int | None, block_size: int) -> ModuleType | None:
    """Return `fused_kernels.py` if it supports this vector: int8 and float32, on a GPU, in blocks of a power of two."""
    is_ours = x.device.type in DEVICES and bits == 8 and x.dtype == torch.float32 and x.is_contiguous()
    return _loaded(x.device, block_size) if is_ours and block_size & (block_size - 1) == 0 else None


@cache
def _loaded(device: torch.device, block_size: int) -> ModuleType | None:
    """Import the kernels and compile them, so that neither delays the first exchange."""
    try:
        from lightning_diloco.core import fused_kernels

        x, q, scales = (
            torch.zeros(16, dtype=kind, device=device) for kind in (torch.float32, torch.int8, torch.bfloat16)
        )
        fused_kernels.quantize(x, q, scales[:1], 16)
        fused_kernels.add(q, scales[:1], x, 1, 16)
    except Exception as error:  # no triton, or none for this device, or no compiler on this machine
        log.warning(
            "triton cannot be used on %s (%s: %s): encoding and decoding make more passes over memory",
            device,
            type(error).__name__,
            error,
        )
        return None
    return fused_kernels
