"""Values on the wire: int8, int4, bf16 and fp32, encoded to bytes and decoded to float32.

1. int8 and int4 buffers hold the integers, then the bfloat16 scales (see blocks.py); bf16 and fp32 the values.
2. All of it is in the byte order of the machine, little-endian on every supported one.
3. NaN and Inf never get onto the wire: the sender raises. A buffer that holds them anyway is corrupt.
4. decode is exact: all parties that decode the same bytes get the same float32 bits.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.blocks import Bits, dequantize_into, num_blocks, packed_nbytes, quantize_into
from lightning_diloco.core.layout import FragmentLayout
from lightning_diloco.errors import CorruptMessageError, NonFiniteError

_BITS: dict[Wire, Bits] = {"int8": 8, "int4": 4}
_FLOATS: dict[Wire, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized vector.

    Args:
        q: int8 values; for 4 bits two of them per byte, still as int8.
        scales: (blocks,) bfloat16.
        numel: number of values.
        bits: 8 or 4.
        block_size: values per scale.
    """

    q: Tensor
    scales: Tensor
    numel: int
    bits: Bits
    block_size: int

    @property
    def nbytes(self) -> int:
        """Size of integers and scales together."""
        return self.q.nbytes + self.scales.nbytes

    def dequantize(self, out: Tensor | None = None) -> Tensor:
        """The values as (numel,) float32, written into out if given."""
        out = torch.empty(self.numel, device=self.q.device) if out is None else out
        dequantize_into(self.q, self.scales, out, bits=self.bits, block_size=self.block_size)
        return out


def quantize(x: Tensor, *, bits: Bits = 8, block_size: int = 256, name: str = "values") -> Quantized:
    """Quantize a vector in blocks.

    Args:
        x: 1-D float32 or bfloat16, any length, any device.
        bits: 8 or 4.
        block_size: values that share a scale, even.
        name: what the values are, for the error.

    Raises:
        NonFiniteError: x holds NaN or Inf.
    """
    q = torch.empty(packed_nbytes(x.numel(), bits, block_size), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_blocks(x.numel(), block_size), dtype=torch.bfloat16, device=x.device)
    quantize_into(x, q, scales, bits=bits, block_size=block_size)
    if not _all_finite(scales):
        raise _non_finite(name)
    return Quantized(q, scales, x.numel(), bits, block_size)


def wire_nbytes(numel: int, wire: Wire, block_size: int) -> int:
    """Bytes that numel values take on the wire."""
    if wire in _FLOATS:
        return numel * _FLOATS[wire].itemsize
    return packed_nbytes(numel, _BITS[wire], block_size) + 2 * num_blocks(numel, block_size)


def encode(x: Tensor, *, wire: Wire, block_size: int, name: str) -> Tensor:
    """Encode a vector for the wire.

    Args:
        x: 1-D float32 or bfloat16, any length, any device.
        wire: precision.
        block_size: values that share a scale; ignored for bf16 and fp32.
        name: what the values are, for the error.

    Returns:
        1-D uint8, contiguous, wire_nbytes long, on the device of x; never shares memory with x.

    Raises:
        NonFiniteError: x holds NaN, Inf, or values too large for bf16.
    """
    if wire in _FLOATS:
        values = x.to(_FLOATS[wire], copy=True)
        if not _all_finite(values):
            raise _non_finite(name)
        return values.view(torch.uint8)
    quantized = quantize(x, bits=_BITS[wire], block_size=block_size, name=name)
    return torch.cat((quantized.q.view(torch.uint8), quantized.scales.view(torch.uint8)))


def encode_fragment(layout: FragmentLayout, flat: Tensor, wire: Wire, block_size: int) -> Tensor:
    """Like `encode`, for a flat fragment; the error names the parameters that hold NaN or Inf.

    Raises:
        NonFiniteError: naming up to five slices.
    """
    try:
        return encode(flat, wire=wire, block_size=block_size, name="fragment")
    except NonFiniteError as error:
        as_sent = flat.to(_FLOATS.get(wire, torch.float32))
        culprits = [str(entry.slice) for entry in layout.entries if not _all_finite(entry.of(as_sent))]
        named = ", ".join(culprits[:5]) + (f" and {len(culprits) - 5} more" if len(culprits) > 5 else "")
        raise _non_finite(named or "padding") from error


class Decoder:
    """Reads parts of an encoded vector, so that nobody has to hold all of it as float32.

    Args:
        buffer: 1-D uint8; must stay unchanged while this is used.
        numel: number of values.
        wire: precision.
        block_size: values that share a scale.

    Raises:
        CorruptMessageError: wrong length, values that are not finite, or scales that are negative or not finite.
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
        if self._bits is None:
            self._values = _reinterpret(buffer, _FLOATS[wire])
            healthy = _all_finite(self._values)
        else:
            num_packed = packed_nbytes(numel, self._bits, block_size)
            self._values = buffer[:num_packed].view(torch.int8)
            self._scales_B = _reinterpret(buffer[num_packed:], torch.bfloat16).float()
            healthy = _all_finite(self._scales_B) and not bool((self._scales_B < 0).any())
        if not healthy:
            raise CorruptMessageError(
                f"payload of {numel} values as {wire} holds NaN, Inf or negative scales: only finite values are sent; "
                "the message was discarded and may be sent again"
            )

    def read(self, start: int, out: Tensor) -> Tensor:
        """Decode values start..start + len(out) into out, 1-D float32, and return it.

        start is a multiple of the block size; the stop too, unless it is the end.
        """
        stop = start + out.numel()
        if self._bits is None:
            return out.copy_(self._values[start:stop])
        low, high = (packed_nbytes(at, self._bits, self._block_size) for at in (start, stop))
        scales_B = self._scales_B[start // self._block_size : num_blocks(stop, self._block_size)]
        dequantize_into(self._values[low:high], scales_B, out, bits=self._bits, block_size=self._block_size)
        return out


def decode(buffer: Tensor, *, numel: int, wire: Wire, block_size: int, out: Tensor | None = None) -> Tensor:
    """Decode a whole vector.

    Args:
        buffer: 1-D uint8 from `encode`, on any device.
        numel: number of values.
        wire: precision.
        block_size: values that share a scale.
        out: (numel,) float32 to write into; None: a new one.

    Returns:
        (numel,) float32.

    Raises:
        CorruptMessageError: see `Decoder`; out is untouched then.
    """
    decoder = Decoder(buffer, numel, wire, block_size)
    return decoder.read(0, torch.empty(numel, device=buffer.device) if out is None else out)


class ErrorFeedbackEncoder:
    """Encodes a stream of vectors, adding to each what rounding took from the ones before.

    Args:
        numel: length of every vector.
        wire: precision.
        block_size: values that share a scale.
        enabled: False keeps the residual at zero.

    Source: error feedback as in MuLoCo (arXiv 2505.23725), decay 1.
    """

    def __init__(self, numel: int, wire: Wire, block_size: int, enabled: bool = True) -> None:
        self._wire: Wire = wire
        self._block_size = block_size
        self._enabled = enabled
        self.residual = torch.zeros(numel)

    def encode(self, x: Tensor, name: str) -> Tensor:
        """Encode x plus the residual as uint8, and keep what is lost; x stays as it is.

        Raises:
            NonFiniteError: the residual is unchanged then.
        """
        if not self._enabled:
            return encode(x, wire=self._wire, block_size=self._block_size, name=name)
        self.residual = self.residual.to(x.device)
        wanted = self.residual + x
        buffer = encode(wanted, wire=self._wire, block_size=self._block_size, name=name)
        sent = decode(buffer, numel=x.numel(), wire=self._wire, block_size=self._block_size)
        self.residual = wanted.sub_(sent)
        return buffer

    def reset(self) -> None:
        """Forget the residual."""
        self.residual.zero_()


def _reinterpret(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as dtype, copied only if they start at an odd place."""
    return (buffer if buffer.storage_offset() % dtype.itemsize == 0 else buffer.clone()).view(dtype)


def _all_finite(x: Tensor) -> bool:
    """One pass without a temporary: the extremes are finite exactly if everything is (NaN propagates)."""
    return x.numel() == 0 or bool(torch.stack(torch.aminmax(x)).isfinite().all())


def _non_finite(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"found NaN or Inf in {name}: only finite values can be sent; "
        "lower the learning rate, clip gradients, or look for the first step with a bad loss"
    )
