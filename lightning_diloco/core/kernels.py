"""Loops over int8 fragments that numba compiles. Each makes one pass over memory and does not hold the GIL.

1. Each function gives the same bits as the torch code that calls it (`blocks.py`, `encoded.py`, `outer.py`). It makes
   the same float32 operations in the same order, without fused multiply-adds.
2. A caller cuts long vectors into units of whole blocks and has several threads process them (`native.py`). No result
   depends on which thread processes a unit.
3. Only `native.py` imports this module, because importing it needs numba.

A last block may be short.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

_compiled = njit(nogil=True, cache=True, error_model="numpy")

Floats = NDArray[np.float32]
Integers = NDArray[np.int8]
Halves = NDArray[np.uint16]  # bfloat16
Doubles = NDArray[np.float64]
Addresses = NDArray[np.int64]  # (contributors, 2): addresses of integers and of scales; M is not part of the type

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.uint16(0x0080)


@_compiled
def _widened(x: np.uint16) -> np.float32:
    """Convert bfloat16 to float32."""
    wide: np.float32 = np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return wide


@_compiled
def _scale_for(largest: np.uint32, num_levels: np.float32) -> np.uint16:
    """Return the scale of a block from the bits of its maximum magnitude (rules 2 and 3 of `blocks.py`)."""
    bits = np.float32(np.uint32(largest).view(np.float32) / num_levels).view(np.uint32)
    scale: np.uint16 = np.uint16(bits >> np.uint32(16))
    if bits < _INFINITE and np.uint16(bits) != 0:
        scale = np.uint16(scale + np.uint16(1))
    return scale if scale >= _SMALLEST_NORMAL else np.uint16(0)


@_compiled
def _divisor_for(scale: np.uint16) -> np.float32:
    divisor = _widened(scale)
    return divisor if divisor != 0 else np.float32(np.inf)


def _pointer_type(_: Any, address: Any) -> tuple[Any, Any]:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_pointer_type)  # an address as the pointer that numba's `carray` takes


@_compiled
def _integers(address: int, numel: int) -> Integers:
    """Return int8 values in memory as an array."""
    values: Integers = carray(_pointer(address), numel, np.int8)
    return values


@_compiled
def _scale(address: int, block: int) -> np.float32:
    """Return one of the bfloat16 scales in memory as float32."""
    return _widened(carray(_pointer(address), block + 1, np.uint16)[block])


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
def weighted_sum(payloads: Addresses, coefs: Doubles, start: int, out: Halves, block_size: int) -> None:
    """Write the weighted sum of several quantized vectors, from value start on, rounded to nearest even."""
    total = np.empty(block_size, np.float32)
    bits = total.view(np.uint32)
    for at in range(0, len(out), block_size):
        numel = min(block_size, len(out) - at)
        total[:] = np.float32(-0.0)  # -0.0 + x is x, also for x = -0.0
        for m in range(len(coefs)):
            q = _integers(payloads[m, 0] + start + at, numel)
            scale = _scale(payloads[m, 1], (start + at) // block_size)
            weight = np.float32(coefs[m] * np.float64(scale))
            for i in range(numel):
                total[i] += np.float32(q[i]) * weight
        rounded = out[at : at + numel]
        for i in range(numel):
            odd = np.uint32(np.uint32(bits[i] >> np.uint32(16)) & np.uint32(1))
            rounded[i] = np.uint16(np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_compiled
def dots(payloads: Addresses, start: int, stop: int, block_size: int) -> Doubles:
    """Return the dot products of all pairs of vectors, exact within a block and added up block after block."""
    num = len(payloads)
    sums = np.zeros((num, num), np.float64)
    wide = np.empty((num, block_size), np.int16)
    scales = np.empty(num, np.float64)
    for at in range(start, stop, block_size):
        numel = min(block_size, stop - at)
        for m in range(num):
            scales[m] = _scale(payloads[m, 1], at // block_size)
            q, row = _integers(payloads[m, 0] + at, numel), wide[m]
            for i in range(numel):
                row[i] = q[i]
        for m in range(num):
            left = wide[m, :numel]
            for n in range(m + 1):
                right = wide[n, :numel]
                inner = np.int32(0)
                for i in range(numel):
                    inner = np.int32(inner + np.int32(np.int32(left[i]) * np.int32(right[i])))
                sums[m, n] += scales[m] * scales[n] * np.float64(inner)
    for m in range(num):
        for n in range(m):
            sums[n, m] = sums[m, n]
    return sums


@_compiled
def momentum_dots(gradient: Halves, momentum: Floats, block_size: int, every: int) -> tuple[float, float]:
    """Return the dot products of the momentum with the gradient and with itself in one of `every` blocks."""
    along, square = np.zeros(block_size, np.float64), np.zeros(block_size, np.float64)
    for at in range(0, len(gradient), every * block_size):
        for i in range(block_size):
            buffer = np.float64(momentum[at + i])
            along[i] += np.float64(_widened(gradient[at + i])) * buffer
            square[i] += buffer * buffer
    totals = np.zeros(2, np.float64)
    for i in range(block_size):
        totals[0] += along[i]
        totals[1] += square[i]
    return totals[0], totals[1]


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
