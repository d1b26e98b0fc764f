"""Wire encoding of fragments on XLA devices: the devices quantize, the host assembles the bytes.

1. Each device quantizes its own elements. One byte per element and one scale per unit are copied to the host.
2. A quantization block that spans several devices has one scale. To compute it, the devices gather the maximum
   magnitude of each unit. If units are whole blocks, nothing is gathered.
3. int4 is packed on the devices if units are whole blocks, otherwise on the host.

Shapes: _P flat padded fragment on the host, _NL devices x elements, _NS devices x units, _NSU devices x units x
elements of a unit, _B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_diloco.config import Wire
from lightning_diloco.core.blocks import Bits, divisor_for, pack, packed_nbytes, scales_for, unpack
from lightning_diloco.devices.xla.layout import XlaLayout
from lightning_diloco.devices.xla.ops import upload

Parts = tuple[Tensor, ...]  # integers and scales, or floats: [N, ...] each

_BITS: dict[Wire, Bits] = {"int8": 8, "int4": 4}
_FLOATS: dict[Wire, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class XlaCodec:
    """Encoder and decoder of one fragment.

    Args:
        layout: the fragment's layout.
        wire: wire precision.
    """

    def __init__(self, layout: XlaLayout, wire: Wire) -> None:
        self._layout, self._wire = layout, wire
        self._bits = _BITS.get(wire)
        self._unit, self._size = layout.unit, layout.block_size
        self._is_packed = self._bits == 4 and self._unit == self._size
        self._shared_blocks = None if self._unit == self._size else self._upload_shared_blocks()

    def _upload_shared_blocks(self) -> tuple[Tensor, Tensor]:
        """Return the units of each block, int32 [B, units per block], and the block of each unit, int32 [N, S]."""
        layout, per_block = self._layout, self._size // self._unit
        num_units = layout.num_devices * layout.row_numel // self._unit
        numbers = torch.arange(1, num_units + 1, dtype=torch.int32).view(layout.num_devices, -1)
        units = layout.to_wire(numbers, self._unit).view(-1, per_block)
        units = torch.where(units == 0, units[:, :1], units) - 1  # padding: repeat the block's first unit
        blocks = torch.arange(len(units), dtype=torch.int32).repeat_interleave(per_block)
        return upload(units)[0], upload(layout.from_wire(blocks, self._unit), dim=0)[0]

    # --- graphs: training thread ---------------------------------------------------------------------------------

    def encoded(self, x_NL: Tensor) -> Parts:
        """Encode [N, L]; a unit that holds NaN or Inf gets the scale NaN."""
        if self._bits is None:
            return (self._layout.shared(x_NL.to(_FLOATS[self._wire], copy=True)),)
        x_NSU = x_NL.view(len(x_NL), -1, self._unit)
        amax_NS = x_NSU.abs().amax(2)
        if self._shared_blocks is not None:
            units_of, block_of = self._shared_blocks
            amax_NS = amax_NS.view(-1)[units_of].amax(1)[block_of]
        scales_NS = scales_for(amax_NS, self._bits)
        q_NSU = (x_NSU / divisor_for(scales_NS).unsqueeze(2)).round().to(torch.int8)
        q_NSU = pack(q_NSU) if self._is_packed else q_NSU
        # On some devices max ignores NaN, so the scale alone would not show it.
        scales_NS = torch.where(torch.isfinite(x_NSU).all(2), scales_NS, torch.nan)
        return self._layout.shared(q_NSU.view(len(x_NL), -1)), self._layout.shared(scales_NS)

    def decoded(self, parts: Parts) -> Tensor:
        """Decode to float32 [N, L]."""
        if self._bits is None:
            return parts[0].float()
        q, scales_NS = parts
        q_NSU = q.view(*scales_NS.shape, -1)
        q_NSU = torch.cat(unpack(q_NSU), dim=2) if self._is_packed else q_NSU
        return (q_NSU * scales_NS.float().unsqueeze(2)).view(len(q), -1)

    # --- link thread ---------------------------------------------------------------------------------------------

    def payload(self, parts: Parts) -> Tensor:
        """Assemble the wire bytes from fetched parts."""
        if self._bits is None:
            return self._layout.to_wire(parts[0]).view(torch.uint8)
        q, scales = parts
        q = self._layout.to_wire(q, 2 if self._is_packed else 1)
        if self._bits == 4 and not self._is_packed:
            q = pack(q.view(-1, self._size)).view(-1)
        scales_B = self._layout.to_wire(scales, self._unit).view(-1, self._size // self._unit).amax(1)
        return torch.cat((q.view(torch.uint8), scales_B.view(torch.uint8)))

    def upload(self, payload: Tensor) -> Parts:
        """Upload wire bytes, already checked, for decoding on the devices."""
        if self._bits is None:
            values = payload.clone().view(_FLOATS[self._wire])
            return tuple(upload(self._layout.from_wire(values), dim=0))
        split = packed_nbytes(self._layout.padded_numel, self._bits, self._size)
        q, scales_B = payload[:split].view(torch.int8), payload[split:].clone().view(torch.bfloat16)
        if self._bits == 4 and not self._is_packed:
            q = torch.cat(unpack(q.view(len(scales_B), -1)), dim=1).view(-1)
        q = self._layout.from_wire(q, 2 if self._is_packed else 1)
        scales = self._layout.from_wire(scales_B.repeat_interleave(self._size // self._unit), self._unit)
        return tuple(upload(q, scales, dim=0))
