"""Element order of fragments on XLA devices.

1. A fragment is one tensor [N, L]; row n holds device n's elements of all slices, one slice after another. Each device
   builds its row from its own parameter shards, so no element is gathered. On one device (N = 1) the order equals the
   wire order.
2. On each device, a slice consists of runs: stretches of the shard that are contiguous in the slice. A run that ends
   inside a quantization block splits the block into units; the maxima of these units are gathered (see codec.py).
3. Some slices cannot be split along their shards: replicated parameters, parameters sharded along rows that are cut
   into several slices, and slices with few elements or with tiny units. Their parameters are gathered, and each
   device takes some of the blocks. With the default sharding no large parameter is among them.
4. The host converts between this order and the wire order.

Shapes: _P flat padded fragment on the host, _NL devices x elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_diloco.core.fragments import Entry, FragmentLayout
from lightning_diloco.devices.xla.ops import num_mesh_devices, shard, sharded_dim

_FEW_ELEMENTS = 1 << 16
_SMALLEST_UNIT = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One slice in device order.

    Args:
        entry: the slice in wire order.
        num_runs: number of runs on each device.
        run: elements per run.
        is_local: whether each device's runs are in its own shard of the parameter.
    """

    entry: Entry
    num_runs: int
    run: int
    is_local: bool

    @property
    def width(self) -> int:
        """Return the number of elements on each device."""
        return self.num_runs * self.run


class XlaLayout:
    """The element order of one fragment.

    Args:
        layout: the wire order.
        params: live parameters, sharded or not.
        block_size: elements that share a quantization scale.

    Attributes:
        parts: the fragment's parts, in wire order.
        num_devices: N.
        row_numel: L, a multiple of the unit.
        unit: number of adjacent elements that are on one device and in one block; divides the block size.
        padded_numel: P.
        block_size: elements that share a quantization scale.
    """

    def __init__(self, layout: FragmentLayout, params: Mapping[str, Tensor], block_size: int) -> None:
        self.num_devices = num_mesh_devices()
        self.parts = [self._part(entry, params[entry.slice.name], block_size) for entry in layout.entries]
        self.row_numel = sum(part.width for part in self.parts)
        self.unit = gcd(block_size, *(part.run for part in self.parts))
        self.padded_numel, self.block_size = layout.padded_numel, block_size

    def _part(self, entry: Entry, param: Tensor, block_size: int) -> Part:
        dim, count = sharded_dim(param), self.num_devices
        is_cut_along = dim == 0 and tuple(param.shape) != entry.shape
        if dim is not None and not is_cut_along and entry.shape[dim] % count == 0:
            num_runs = prod(entry.shape[:dim])
            run = entry.numel // (num_runs * count)
            unit = gcd(run, block_size)
            if unit == block_size or (unit >= _SMALLEST_UNIT and entry.numel > _FEW_ELEMENTS):
                return Part(entry, num_runs, run, is_local=True)
        return Part(entry, 1, -(-entry.numel // (count * block_size)) * block_size, is_local=False)

    # --- host ----------------------------------------------------------------------------------------------------

    def from_wire(self, values: Tensor, per_value: int = 1) -> Tensor:
        """Convert a host vector from wire order to device order.

        Args:
            values: [P / per_value], each value standing for `per_value` adjacent elements.
            per_value: a divisor of the unit.

        Returns:
            [N, L / per_value]; a view of `values` if there is one device.
        """
        if self.num_devices == 1:
            return values.view(1, -1)
        out = values.new_zeros(self.num_devices, self.row_numel // per_value)
        for columns, elements, (num_runs, run) in self._places(per_value):
            missing = num_runs * self.num_devices * run - (elements.stop - elements.start)
            runs = pad(values[elements], (0, missing)).view(num_runs, self.num_devices, run)
            out[:, columns].view(self.num_devices, num_runs, run).copy_(runs.transpose(0, 1))
        return out

    def to_wire(self, rows_NL: Tensor, per_value: int = 1) -> Tensor:
        """Convert from device order to wire order, with zero padding; the inverse of `from_wire`."""
        if self.num_devices == 1:
            return rows_NL.view(-1)
        out = rows_NL.new_zeros(self.padded_numel // per_value)
        for columns, elements, (num_runs, run) in self._places(per_value):
            runs = rows_NL[:, columns].view(self.num_devices, num_runs, run).transpose(0, 1).reshape(-1)
            out[elements] = runs[: elements.stop - elements.start]
        return out

    def _places(self, per_value: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
        """Yield for each part its columns, its elements in wire order, and (number of runs, run length), in values."""
        start = 0
        for part in self.parts:
            size, offset = self.block_size, part.entry.offset
            numel = min(-(-part.entry.numel // size) * size, part.width * self.num_devices)
            columns, elements = (start, start + part.width), (offset, offset + numel)
            yield (
                slice(*(bound // per_value for bound in columns)),
                slice(*(bound // per_value for bound in elements)),
                (part.num_runs, part.run // per_value),
            )
            start += part.width

    # --- graphs: training thread ---------------------------------------------------------------------------------

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join parts, [N, width] each, to [N, L]."""
        return self.shared(torch.cat(list(parts), dim=1))

    def split(self, x_NL: Tensor) -> Sequence[Tensor]:
        """Split [N, L] into parts; the inverse of `joined`."""
        return torch.split(x_NL, [part.width for part in self.parts], dim=1)

    def part_of(self, part: Part, rows: Tensor) -> Tensor:
        """Convert a slice to device order, [N, width]."""
        count = self.num_devices
        if part.is_local:
            return rows.reshape(part.num_runs, count, part.run).transpose(0, 1).reshape(count, part.width)
        if missing := count * part.width - part.entry.numel:
            rows = pad(rows.reshape(-1), (0, missing))
        return rows.reshape(count, part.width)

    def rows_of(self, part: Part, values: Tensor) -> Tensor:
        """Convert a slice back to its shape; the inverse of `part_of`."""
        if part.is_local:
            runs = values.reshape(self.num_devices, part.num_runs, part.run)
            return runs.transpose(0, 1).reshape(part.entry.shape)
        if values.numel() > part.entry.numel:
            values = values.reshape(-1)[: part.entry.numel]
        return values.reshape(part.entry.shape)

    def shared(self, x: Tensor) -> Tensor:
        """Shard a tensor that was just computed along dimension 0."""
        if self.num_devices > 1:
            shard(x, 0)
        return x
