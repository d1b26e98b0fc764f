"""Kernels over int8 fragments that Triton compiles for a GPU. Each makes one pass over memory.

1. Each function gives the same bits as the torch code that calls it (`blocks.py`, `quantize.py`). Divisions are rounded
   to nearest; the product of an integer and a scale is exact, so a fused multiply-add changes nothing.
2. A program processes whole blocks. A last block may be short.
3. Only `fused.py` imports this module, because importing it needs triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_NUMEL = 4096  # values that one program processes

_INT8_LEVELS = tl.constexpr(127.0)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL = tl.constexpr(0x0080)
_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has the rounded value in its low bits


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(x, q, scales, numel, num_blocks: tl.constexpr, block_size: tl.constexpr):  # type: ignore # noqa: PLR0917
    blocks = tl.program_id(0).to(tl.int64) * num_blocks + tl.arange(0, num_blocks)
    at = blocks[:, None] * block_size + tl.arange(0, block_size)[None, :]
    values = tl.load(x + at, mask=at < numel, other=0.0)
    # As bits, magnitudes have the order of their values, and NaN is the largest.
    largest = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
    bits = tl.div_rn(largest.to(tl.float32, bitcast=True), _INT8_LEVELS).to(tl.int32, bitcast=True)
    is_between = (bits < _INFINITE) & ((bits & 0xFFFF) != 0)
    scale = (bits >> 16) + tl.where(is_between, 1, 0)
    scale = tl.where(scale < _SMALLEST_NORMAL, 0, scale)
    tl.store(scales + blocks, scale.to(tl.int16), mask=blocks * block_size < numel)
    divisor = (scale << 16).to(tl.float32, bitcast=True)
    divisor = tl.where(divisor == 0.0, float("inf"), divisor)
    rounded = tl.div_rn(values, divisor[:, None]) + _ROUNDS
    tl.store(q + at, rounded.to(tl.int32, bitcast=True).to(tl.int8), mask=at < numel)


@triton.jit  # type: ignore[untyped-decorator]
def _add(q, scales, out, sign, numel, num_blocks: tl.constexpr, block_size: tl.constexpr):  # type: ignore # noqa: PLR0917
    blocks = tl.program_id(0).to(tl.int64) * num_blocks + tl.arange(0, num_blocks)
    at = blocks[:, None] * block_size + tl.arange(0, block_size)[None, :]
    scale = tl.load(scales + blocks, mask=blocks * block_size < numel, other=0)
    weight = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True) * sign
    integers = tl.load(q + at, mask=at < numel, other=0).to(tl.float32)
    sums = tl.load(out + at, mask=at < numel) + integers * weight[:, None]
    tl.store(out + at, sums, mask=at < numel)


def quantize(x_P: Tensor, q_P: Tensor, scales_B: Tensor, block_size: int) -> None:
    """Quantize to int8.

    Args:
        x_P: float32.
        q_P: int8, overwritten.
        scales_B: bfloat16, overwritten.
        block_size: a power of two.
    """
    num_blocks, grid = _tiles(x_P, block_size)
    with torch.accelerator.device_index(x_P.device.index):
        _quantize[grid](x_P, q_P, scales_B.view(torch.int16), x_P.numel(), num_blocks, block_size)


def add(q_P: Tensor, scales_B: Tensor, out_P: Tensor, sign: int, block_size: int) -> None:
    """Add the dequantized values, or subtract them if sign is -1, to out_P, float32."""
    num_blocks, grid = _tiles(out_P, block_size)
    with torch.accelerator.device_index(out_P.device.index):
        _add[grid](q_P, scales_B.view(torch.int16), out_P, float(sign), out_P.numel(), num_blocks, block_size)


def _tiles(x_P: Tensor, block_size: int) -> tuple[int, tuple[int]]:
    """Return the number of blocks of a program, and the grid."""
    num_blocks = max(1, _TILE_NUMEL // block_size)
    return num_blocks, (triton.cdiv(x_P.numel(), num_blocks * block_size),)
