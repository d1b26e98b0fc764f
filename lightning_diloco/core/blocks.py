"""Blockwise integer quantization and dequantization of float vectors.

1. Quantization is symmetric and rounds to nearest even. Each block of block_size adjacent values has one scale; the
   last block may be short.
2. A scale is amax / qmax, rounded *up* to bfloat16, so nothing clips. The product int * bfloat16 is exact in float32,
   so every device decodes to the same bits, with or without fused multiply-add.
3. A block whose scale would be subnormal becomes zero, because accelerators flush subnormals and all parties must
   agree.
4. int4 packs the first half of a block into the low nibbles and the second half into the high nibbles.
5. On a CPU, all work is done in chunks that stay in the cache, in buffers that are allocated once. This takes 2.8 times
   as long as a memcpy of the input. The loops of `kernels.py` take as long as one memcpy; the one-line formula takes 35
   times as long.

Shapes: _P values, _B blocks, _BS (blocks, block size).
Source: our choice; block scales after Streaming DiLoCo (arXiv 2501.18512).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_diloco.core import fused, native

Bits = Literal[4, 8]

CHUNK_NUMEL = 1 << 18
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def packed_nbytes(numel: int, bits: Bits, block_size: int) -> int:
    """Return the bytes of the quantized integers, without scales; a last block of odd length wastes half a byte."""
    return numel if bits == 8 else numel // block_size * (block_size // 2) + (numel % block_size + 1) // 2


def num_blocks(numel: int, block_size: int) -> int:
    """Return the number of blocks, which is the number of scales."""
    return -(-numel // block_size)


def chunk_numel(x: Tensor, block_size: int) -> int:
    """Return the elements to process at once: whole blocks that fit a CPU's cache, or all on an accelerator."""
    whole = CHUNK_NUMEL if x.device.type == "cpu" else x.numel()
    return max(1, whole // block_size) * block_size


def sum_in_order(x: Tensor) -> Tensor:
    """Sum over the first dimension, one after the other: a prefix sum has only one order."""
    sums: Tensor = x.cumsum(0)
    return sums[-1]


def all_finite(x: Tensor) -> bool:
    """Return whether all values are finite; checks minimum and maximum (NaN propagates), without a temporary."""
    return x.numel() == 0 or bool(torch.stack(torch.aminmax(x)).isfinite().all())


def quantize_into(x_P: Tensor, packed: Tensor, scales_B: Tensor, *, bits: Bits, block_size: int) -> None:
    """Quantize a vector; a block that holds NaN or Inf gets a non-finite scale and undefined integers.

    Args:
        x_P: float values.
        packed: int8, packed_nbytes(P) elements, overwritten.
        scales_B: bfloat16, overwritten.
        bits: 8 or 4.
        block_size: even.
    """
    if block_size % 2:
        raise ValueError(f"block_size={block_size}: must be even; use a power of two from 16 to 4096")
    if x_P.dtype == torch.float32 and (kernels := native.kernels_for(x_P, bits)) is not None:
        arrays = native.array(x_P), native.array(packed), native.array(scales_B)

        def quantize(start: int, stop: int) -> None:
            x, q, scales = arrays
            b = slice(start // block_size, num_blocks(stop, block_size))
            kernels.quantize(x[start:stop], q[start:stop], scales[b], block_size, native.INT8_LEVELS)

        native.in_parallel(quantize, native.ranges(x_P.numel(), block_size))
        return
    if (on_gpu := fused.kernels_for(x_P, bits, block_size)) is not None:
        on_gpu.quantize(x_P, packed, scales_B, block_size)
        return
    step = chunk_numel(x_P, block_size)
    work = torch.empty(min(step, x_P.numel()), dtype=torch.float32, device=x_P.device)
    rounded = work if bits == 8 else torch.empty_like(work, dtype=torch.int8)
    whole = x_P.numel() // block_size * block_size
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        x_BS = x_P[start:stop].view(-1, block_size)
        q = packed[packed_nbytes(start, bits, block_size) : packed_nbytes(stop, bits, block_size)]
        scales = scales_B[start // block_size : stop // block_size]
        _quantize_blocks(x_BS, q, scales, work[: stop - start], rounded[: stop - start])
    if whole < x_P.numel():
        tail = x_P[whole:]
        q = packed[packed_nbytes(whole, bits, block_size) :]
        if bits == 4 and tail.numel() % 2:
            tail = torch.cat((tail, tail.new_zeros(1)))
        work, rounded = torch.empty_like(tail, dtype=torch.float32), torch.empty_like(tail, dtype=torch.int8)
        _quantize_blocks(tail.view(1, -1), q, scales_B[whole // block_size :], work, rounded)


def _quantize_blocks(x_BS: Tensor, packed: Tensor, scales_B: Tensor, work: Tensor, rounded: Tensor) -> None:
    is_int8 = packed.numel() == x_BS.numel()
    work_BS = work.view_as(x_BS)
    if x_BS.dtype == torch.float32:
        torch.abs(x_BS, out=work_BS)
    else:
        work_BS.copy_(x_BS).abs_()
    scales_B.copy_(scales_for(work_BS.amax(1), 8 if is_int8 else 4))
    torch.div(x_BS, divisor_for(scales_B).unsqueeze(1), out=work_BS)
    work_BS.round_()
    if is_int8:
        packed.view_as(x_BS).copy_(work_BS)
    else:
        pack(rounded.view_as(x_BS).copy_(work_BS), out=packed.view(len(x_BS), -1))


def scales_for(amax_B: Tensor, bits: Bits) -> Tensor:
    """Compute the scales from the blocks' maximum magnitudes, which are overwritten (rules 2 and 3)."""
    # Divide by a tensor. For a number, CUDA multiplies by its inverse, which rounds twice.
    return _round_up(amax_B.div_(amax_B.new_full((), 127.0 if bits == 8 else 7.0)))


def divisor_for(scales_B: Tensor) -> Tensor:
    """Return the float32 divisor of each block; it is Inf if the scale is 0, so that such a block becomes zero."""
    divisor_B = scales_B.float()
    return divisor_B.masked_fill_(divisor_B == 0, torch.inf)


def pack(q: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack 4-bit integers, two per byte (rule 4).

    Args:
        q: int8 [..., block size].
        out: int8 [..., block size / 2], overwritten; None allocates a new tensor.
    """
    low, high = q.chunk(2, dim=-1)
    return torch.bitwise_or(low & 15, high << 4, out=out)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the first and the second half of each block; the inverse of `pack`."""
    # Shifts of int8 restore the sign. On some devices a right shift rounds towards zero, so the low bits are cleared.
    return packed << 4 >> 4, (packed & -16) >> 4


def _round_up(scale_B: Tensor) -> Tensor:
    """Round up to bfloat16, and subnormals to zero; NaN and Inf stay unchanged."""
    nearest = scale_B.to(torch.bfloat16)
    # 1.25 * 2^-8 is 0.6 to 1.25 units in the last place for any mantissa, so this rounds to exactly the next value.
    above = (nearest.float() * (1 + 1.25 * 2**-8)).to(torch.bfloat16)
    up = torch.where(nearest.float() < scale_B, above, nearest)
    return up.masked_fill_(up < _SMALLEST_NORMAL, 0.0)


def dequantize_into(packed: Tensor, scales_B: Tensor, out_P: Tensor, *, bits: Bits, block_size: int) -> None:
    """Dequantize a vector; the inverse of `quantize_into`, up to rounding.

    Args:
        packed: int8, packed_nbytes(P) elements.
        scales_B: bfloat16.
        out_P: float32, overwritten.
        bits: 8 or 4.
        block_size: as at quantization.
    """
    if (kernels := native.kernels_for(out_P, bits)) is not None:
        q, scales, out = native.array(packed), native.array(scales_B), native.array(out_P)

        def dequantize(start: int, stop: int) -> None:
            b = slice(start // block_size, num_blocks(stop, block_size))
            kernels.dequantize(q[start:stop], scales[b], out[start:stop], block_size)

        native.in_parallel(dequantize, native.ranges(len(out), block_size))
        return
    step = chunk_numel(out_P, block_size)
    for start in range(0, out_P.numel(), step):
        chunk_P = out_P[start : start + step]
        stop = start + chunk_P.numel()
        integers_into(
            packed[packed_nbytes(start, bits, block_size) : packed_nbytes(stop, bits, block_size)],
            chunk_P,
            bits,
            block_size,
        )
        scale_blocks_(chunk_P, scales_B[start // block_size : num_blocks(stop, block_size)].float(), block_size)


def integers_into(packed: Tensor, out_P: Tensor, bits: Bits, block_size: int) -> None:
    """Write the integers to out_P as float32, without their scales."""
    if bits == 8:
        out_P.copy_(packed)
        return
    whole = out_P.numel() // block_size * block_size
    for start, stop in ((0, whole), (whole, out_P.numel())):
        if start < stop:
            size = min(block_size, stop - start)
            q = packed[packed_nbytes(start, bits, block_size) : packed_nbytes(stop, bits, block_size)]
            both = torch.cat(unpack(q.view(-1, (size + 1) // 2)), dim=1)
            out_P[start:stop].view(-1, size).copy_(both[:, :size])


def scale_blocks_(x_P: Tensor, factors_B: Tensor, block_size: int) -> Tensor:
    """Multiply each block by a float32 factor, in place."""
    whole = x_P.numel() // block_size
    x_P[: whole * block_size].view(whole, block_size).mul_(factors_B[:whole].unsqueeze(1))
    x_P[whole * block_size :].mul_(factors_B[whole:])
    return x_P
