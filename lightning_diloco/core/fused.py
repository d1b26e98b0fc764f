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
    """Import the kernels and compile them for this block size. A learner's first use is before its training begins."""
    try:
        from lightning_diloco.core import fused_kernels

        x, q = torch.zeros(block_size, device=device), torch.zeros(block_size, dtype=torch.int8, device=device)
        scales = torch.zeros(1, dtype=torch.bfloat16, device=device)
        fused_kernels.quantize(x, q, scales, block_size)
        fused_kernels.add(q, scales, x, 1, block_size)
    except Exception as error:  # triton is missing, does not support this device, or finds no compiler
        log.warning(
            "triton cannot be used on %s (%s: %s): encoding and decoding make more passes over memory",
            device,
            type(error).__name__,
            error,
        )
        return None
    return fused_kernels
