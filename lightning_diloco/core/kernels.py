"""Loops over int8 fragments that numba compiles: one pass over memory each, without the interpreter's lock.

1. Each function gives the same bits as the torch code that calls it (`blocks.py`, `encoded.py`, `outer.py`). It makes
   the same float32 operations in the same order, without fused multiply-adds.
2. A caller cuts long vectors into units of whole blocks and has several threads process them (`native.py`). No result
   depends on which thread processes a unit.
3. Only `native.py` imports this module, because importing it needs numba.

A last block may be short.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_compiled = njit(nogil=True, cache=True, error_model="numpy")

Floats = NDArray[np.float32]
Integers = NDArray[np.int8]
Halves = NDArray[np.uint16]  # bfloat16

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.uint16(0x0080)


@_compiled
def _widened(x: np.uint16) -> np.float32:
    """bfloat16 to float32."""
    wide: np.float32 = np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return wide


@_compiled
def _scale_for(largest: np.uint32, num_levels: np.float32) -> np.uint16:
    """The scale of a block from the bits of its maximum magnitude: rules 2 and 3 of `blocks.py`."""
    bits = np.float32(np.uint32(largest).view(np.float32) / num_levels).view(np.uint32)
    scale: np.uint16 = np.uint16(bits >> np.uint32(16))
    if bits < _INFINITE and np.uint16(bits) != 0:
        scale = np.uint16(scale + np.uint16(1))
    return scale if scale >= _SMALLEST_NORMAL else np.uint16(0)


@_compiled
def _divisor_for(scale: np.uint16) -> np.float32:
    divisor = _widened(scale)
    return divisor if divisor != 0 else np.float32(np.inf)


@_compiled
def quantize(x: Floats, q: Integers, scales: Halves, block_size: int, num_levels: np.float32) -> None:
    """Quantize to int8."""
    for b in range(len(scales)):
        source, target = x[b * block_size : (b + 1) * block_size], q[b * block_size : (b + 1) * block_size]
        bits, largest = source.view(np.uint32), np.uint32(0)
        for i in range(len(bits)):
            largest = max(largest, np.uint32(bits[i] & _MAGNITUDE))
        scales[b] = _scale_for(largest, num_levels)
        divisor = _divisor_for(scales[b])
        for i in range(len(source)):
            target[i] = np.int8(np.int32(np.rint(source[i] / divisor)))


@_compiled
def dequantize(q: Integers, scales: Halves, out: Floats, block_size: int) -> None:
    """Write the dequantized values to out."""
    for b in range(len(scales)):
        source, target = q[b * block_size : (b + 1) * block_size], out[b * block_size : (b + 1) * block_size]
        scale = _widened(scales[b])
        for i in range(len(source)):
            target[i] = np.float32(source[i]) * scale


@_compiled
def add_weighted(q: Integers, scales: Halves, coef: float, out: Floats, block_size: int) -> None:
    """Add the dequantized values times coef, float64, to out; coef times scale is rounded to float32."""
    for b in range(len(scales)):
        source, target = q[b * block_size : (b + 1) * block_size], out[b * block_size : (b + 1) * block_size]
        weight = np.float32(coef * np.float64(_widened(scales[b])))
        for i in range(len(source)):
            target[i] += np.float32(source[i]) * weight


@_compiled
def to_bfloat16(x: Floats, out: Halves) -> None:
    """Round to nearest even."""
    bits = x.view(np.uint32)
    for i in range(len(x)):
        odd = np.uint32(np.uint32(bits[i] >> np.uint32(16)) & np.uint32(1))
        out[i] = np.uint16(np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_compiled
def dot(q: Integers, scales: Halves, other_q: Integers, other_scales: Halves, block_size: int) -> float:
    """Dot product of two quantized vectors, float64; exact within a block, then summed block after block."""
    total = 0.0
    for b in range(len(scales)):
        left, right = q[b * block_size : (b + 1) * block_size], other_q[b * block_size : (b + 1) * block_size]
        inner = np.int32(0)
        for i in range(len(left)):
            inner = np.int32(inner + np.int32(np.int32(left[i]) * np.int32(right[i])))
        total += np.float64(_widened(scales[b])) * np.float64(_widened(other_scales[b])) * np.float64(inner)
    return total


@_compiled
def outer_step(  # noqa: PLR0917
    gradient: Halves,
    before: tuple[Floats, Floats, Floats],
    after: tuple[Floats, Floats, Floats],
    update: tuple[Integers, Halves],
    coefs: tuple[np.float32, np.float32, np.float32],
    block_size: int,
    num_levels: np.float32,
) -> bool:
    """Make the outer step and publish it (`outer.py`).

    Args:
        gradient: outer gradient.
        before, after: master, momentum and published values; after is overwritten and may be before.
        update: q and scales, overwritten.
        coefs: decay, push and lr, float32.
        block_size: values that share a scale.
        num_levels: 127, float32.

    Returns:
        Whether the momentum and the update are finite.
    """
    master, momentum, published = before
    new_master, new_momentum, new_published = after
    q, scales = update
    decay, push, lr = coefs
    is_finite = True
    moved = np.empty(block_size, np.float32)
    moved_bits = moved.view(np.uint32)
    for b in range(len(scales)):
        start = b * block_size
        largest_momentum, largest = np.uint32(0), np.uint32(0)
        for i in range(block_size):
            k = start + i
            g = _widened(gradient[k])
            buffer = momentum[k] * decay + g
            largest_momentum = max(largest_momentum, np.uint32(np.float32(buffer).view(np.uint32) & _MAGNITUDE))
            value = master[k] - (g + buffer * push) * lr
            new_momentum[k] = buffer
            new_master[k] = value
            moved[i] = value - published[k]
        for i in range(block_size):
            largest = max(largest, np.uint32(moved_bits[i] & _MAGNITUDE))
        if largest_momentum >= _INFINITE or largest >= _INFINITE:
            is_finite = False
        scales[b] = _scale_for(largest, num_levels)
        scale, divisor = _widened(scales[b]), _divisor_for(scales[b])
        for i in range(block_size):
            level = np.rint(moved[i] / divisor)
            q[start + i] = np.int8(np.int32(level))
            new_published[start + i] = published[start + i] + level * scale
    return is_finite
