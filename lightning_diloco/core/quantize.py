"""Wire encoding of values as int8, int4, bf16 or fp32, and decoding to float32.

1. int8 and int4 buffers hold the integers and then the bfloat16 scales (see blocks.py). bf16 and fp32 buffers hold the
   values.
2. Buffers have the machine's byte order, which is little-endian on every supported machine.
3. NaN and Inf are never sent; the sender raises. A received buffer that holds them is corrupt.
4. Decoding is exact: all parties that decode the same bytes get the same float32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core import fused, native
from lightning_diloco.core.blocks import (
    Bits,
    all_finite,
    chunk_numel,
    dequantize_into,
    integers_into,
    num_blocks,
    packed_nbytes,
    quantize_into,
    scale_blocks_,
)
from lightning_diloco.core.layout import FragmentLayout
from lightning_diloco.errors import CorruptMessageError, NonFiniteError

_BITS: dict[Wire, Bits] = {"int8": 8, "int4": 4}
_FLOATS: dict[Wire, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def wire_nbytes(numel: int, wire: Wire, block_size: int) -> int:
    """Return the number of bytes that numel values take on the wire."""
    scales = 0 if wire in _FLOATS else 2 * num_blocks(numel, block_size)
    return integers_nbytes(numel, wire, block_size) + scales


def integers_nbytes(numel: int, wire: Wire, block_size: int) -> int:
    """Return the number of bytes before the scales; all bytes if the precision has no scales."""
    if wire in _FLOATS:
        return numel * _FLOATS[wire].itemsize
    return packed_nbytes(numel, _BITS[wire], block_size)


def encode_unchecked(x: Tensor, *, wire: Wire, block_size: int) -> Tensor:
    """Encode like `encode`, without the check for NaN and Inf, which would wait for the device.

    The training thread may therefore call it. Call `check_fragment` before sending the bytes.
    """
    if wire in _FLOATS:
        return x.to(_FLOATS[wire], copy=True).view(torch.uint8)
    bits = _BITS[wire]
    num_integers = packed_nbytes(x.numel(), bits, block_size)
    nbytes = wire_nbytes(x.numel(), wire, block_size)
    buffer = native.empty(nbytes, torch.uint8) if x.device.type == "cpu" else x.new_empty(nbytes, dtype=torch.uint8)
    scales_B = buffer[num_integers:]
    is_aligned = num_integers % 2 == 0
    scales_B = (
        scales_B.view(torch.bfloat16) if is_aligned else torch.empty_like(x, dtype=torch.bfloat16)[: len(scales_B) // 2]
    )
    quantize_into(x, buffer[:num_integers].view(torch.int8), scales_B, bits=bits, block_size=block_size)
    if not is_aligned:
        buffer[num_integers:].copy_(scales_B.view(torch.uint8))
    return buffer


def encode(x: Tensor, *, wire: Wire, block_size: int, name: str) -> Tensor:
    """Encode a vector for the wire.

    Args:
        x: 1-D float32 or bfloat16, any length, any device.
        wire: wire precision.
        block_size: values that share a scale; ignored for bf16 and fp32.
        name: name of the values in the error message.

    Returns:
        1-D uint8, contiguous, `wire_nbytes` long, on the device of x; does not share memory with x.

    Raises:
        NonFiniteError: x holds NaN, Inf, or values too large for bf16.
    """
    buffer = encode_unchecked(x, wire=wire, block_size=block_size)
    if not all_finite(_float_part(buffer, x.numel(), wire, block_size)):
        raise _non_finite(name)
    return buffer


def encode_fragment(layout: FragmentLayout, flat: Tensor, wire: Wire, block_size: int) -> Tensor:
    """Encode a flat fragment like `encode`; the error names the slices that hold NaN or Inf.

    Raises:
        NonFiniteError: the fragment holds NaN or Inf; names up to five slices.
    """
    buffer = encode_unchecked(flat, wire=wire, block_size=block_size)
    check_fragment(layout, buffer, wire, block_size)
    return buffer


def check_fragment(layout: FragmentLayout, buffer: Tensor, wire: Wire, block_size: int) -> None:
    """Check an encoded fragment for NaN and Inf.

    Raises:
        NonFiniteError: the fragment holds NaN or Inf; names up to five slices.
    """
    floats = _float_part(buffer, layout.padded_numel, wire, block_size)
    if all_finite(floats):
        return
    per_float = 1 if wire in _FLOATS else block_size
    bounds = [(e.slice, e.offset // per_float, num_blocks(e.offset + e.numel, per_float)) for e in layout.entries]
    culprits = [str(rows) for rows, start, stop in bounds if not all_finite(floats[start:stop])]
    raise _non_finite(", ".join(culprits[:5]) + (f" and {len(culprits) - 5} more" if len(culprits) > 5 else ""))


class Decoder:
    """Decoder of ranges of an encoded vector, which needs no float32 copy of the whole.

    Args:
        buffer: 1-D uint8; must not change while the decoder is used.
        numel: number of values.
        wire: wire precision.
        block_size: values that share a scale.

    Raises:
        CorruptMessageError: wrong length, non-finite values, or negative or non-finite scales.
    """

    def __init__(self, buffer: Tensor, numel: int, wire: Wire, block_size: int) -> None:
        expected = wire_nbytes(numel, wire, block_size)
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() != expected:
            raise CorruptMessageError(
                f"payload has {buffer.nbytes} bytes: {numel} values as {wire} with block_size={block_size} take "
                f"{expected}; the message was discarded and may be sent again"
            )
        self._block_size = block_size
        self._bits = _BITS.get(wire)
        self._floats = _float_part(buffer, numel, wire, block_size)
        healthy = all_finite(self._floats)
        if self._bits is not None:
            self._packed = buffer[: packed_nbytes(numel, self._bits, block_size)].view(torch.int8)
            healthy = healthy and not bool((self._floats < 0).any())
        if not healthy:
            raise CorruptMessageError(
                f"payload of {numel} values as {wire} holds NaN, Inf or negative scales: only finite values are sent; "
                "the message was discarded and may be sent again"
            )

    def read(self, start: int, out: Tensor) -> Tensor:
        """Decode values start..start + len(out) into out, 1-D float32, and return it.

        Start and stop must be multiples of the block size; the stop may also be the end of the vector.
        """
        if self._bits is None:
            return out.copy_(self._floats[start : start + out.numel()])
        q, scales_B = self.encoded(start, start + out.numel())
        dequantize_into(q, scales_B, out, bits=self._bits, block_size=self._block_size)
        return out

    def read_integers(self, start: int, out: Tensor) -> Tensor | None:
        """Decode like `read`, without the scales; returns the scales as bfloat16, or None if there are none."""
        if self._bits is None:
            out.copy_(self._floats[start : start + out.numel()])
            return None
        q, scales_B = self.encoded(start, start + out.numel())
        integers_into(q, out, self._bits, self._block_size)
        return scales_B

    def read_scaled(self, start: int, out: Tensor, coef: float) -> Tensor:
        """Decode like `read`, times coef. The product of coef and a scale, or coef alone, is rounded to float32."""
        scales_B = self.read_integers(start, out)
        return (
            out.mul_(coef)
            if scales_B is None
            else scale_blocks_(out, (scales_B.double() * coef).float(), self._block_size)
        )

    def add_to(self, out_P: Tensor, *, sign: int = 1) -> Tensor:
        """Add the whole vector, or subtract it if sign is -1; returns out_P, float32."""
        size = self._block_size
        if (kernels := native.kernels_for(out_P, self._bits)) is not None:
            out = native.array(out_P)

            def add(start: int, stop: int) -> None:
                kernels.add_weighted(*self.arrays(start, stop), float(sign), out[start:stop], size)

            native.in_parallel(add, native.ranges(len(out), size))
            return out_P
        if (on_gpu := fused.kernels_for(out_P, self._bits, size)) is not None:
            on_gpu.add(*self.encoded(0, out_P.numel()), out_P, sign, size)
            return out_P
        step = chunk_numel(out_P, size)
        values = torch.empty(min(step, out_P.numel()), dtype=torch.float32, device=out_P.device)
        for start in range(0, out_P.numel(), step):
            chunk_P = out_P[start : start + step]
            chunk_P.add_(self.read(start, values[: chunk_P.numel()]), alpha=sign)
        return out_P

    def encoded(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the packed integers, int8, and the scales, bfloat16, of a range; int8 and int4 only."""
        assert self._bits is not None
        low, high = (packed_nbytes(at, self._bits, self._block_size) for at in (start, stop))
        return self._packed[low:high], self._floats[start // self._block_size : num_blocks(stop, self._block_size)]

    def arrays(self, start: int, stop: int) -> tuple[native.Array, native.Array]:
        """Return the result of `encoded` as arrays, for `kernels.py`; int8 only. The stop may be inside a block."""
        q, scales_B = self.encoded(start, stop)
        return native.array(q), native.array(scales_B)


def decode(buffer: Tensor, *, numel: int, wire: Wire, block_size: int) -> Tensor:
    """Decode a whole vector.

    Args:
        buffer: 1-D uint8 from `encode`, on any device.
        numel: number of values.
        wire: wire precision.
        block_size: values that share a scale.

    Returns:
        (numel,) float32.

    Raises:
        CorruptMessageError: see `Decoder`.
    """
    decoder = Decoder(buffer, numel, wire, block_size)
    return decoder.read(0, torch.empty(numel, dtype=torch.float32, device=buffer.device))


def scaled(buffer: Tensor, factor: float, *, numel: int, wire: Wire, block_size: int) -> Tensor:
    """Multiply an encoded vector by a factor; scales, or values if there are no scales, keep their precision.

    Args:
        buffer: 1-D uint8 from `encode`.
        factor: 0..1.
        numel: number of values.
        wire: wire precision.
        block_size: values that share a scale.

    Returns:
        A new buffer of the same length, with the same bits on every party.
    """
    floats = _float_part(buffer, numel, wire, block_size)
    smaller = (floats.double() * factor).to(floats.dtype).view(torch.uint8)
    return torch.cat((buffer[: buffer.numel() - smaller.numel()], smaller))


def _float_part(buffer: Tensor, numel: int, wire: Wire, block_size: int) -> Tensor:
    """Return the values of a float buffer or the scales of an integer buffer; copied only if misaligned."""
    dtype = _FLOATS.get(wire, torch.bfloat16)
    part = buffer if wire in _FLOATS else buffer[packed_nbytes(numel, _BITS[wire], block_size) :]
    return (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)


def _non_finite(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"found NaN or Inf in {name}: only finite values can be sent; "
        "lower the learning rate, clip gradients, or look for the first step with a bad loss"
    )
