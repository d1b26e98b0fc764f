"""The flat vector of one fragment: consecutive slices, each padded with zeros to whole quantization blocks.

No block holds elements of two slices. A scale therefore never mixes parameters, and every slice is merged separately.

Shapes: _P flat padded fragment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_diloco.config import Merge

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """Rows start_row..stop_row (exclusive) of one parameter; a scalar has only row 0."""

    name: str
    start_row: int
    stop_row: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of these rows of the full parameter."""
        return tensor[self.start_row : self.stop_row] if tensor.dim() else tensor

    def __str__(self) -> str:
        return f"{self.name}[{self.start_row}:{self.stop_row}]"


@dataclass(frozen=True, slots=True)
class Entry:
    """One slice inside a flat fragment.

    Args:
        slice: the rows of the parameter.
        shape: shape of the slice.
        offset: start in the flat vector, a multiple of the block size.
        numel: number of elements, without padding.
        merge: merge rule of this slice.
    """

    slice: Slice
    shape: Shape
    offset: int
    numel: int
    merge: Merge

    def of(self, flat_P: Tensor) -> Tensor:
        """Return a 1-D view of this slice in a flat fragment, without padding."""
        return flat_P[self.offset : self.offset + self.numel]


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """The positions of a fragment's slices in its flat vector.

    Args:
        entries: the slices, in order of offset.
        numel: number of elements of the fragment, without padding.
        padded_numel: length of the flat vector, a multiple of the block size.
    """

    entries: tuple[Entry, ...]
    numel: int
    padded_numel: int


def gather(layout: FragmentLayout, tensors: Mapping[str, Tensor], out: Tensor) -> Tensor:
    """Copy a fragment out of full parameters.

    Args:
        layout: the fragment's layout.
        tensors: full parameters by name, any float dtype.
        out: (P,) vector, overwritten with zero padding; values are cast to its dtype.

    Returns:
        out.
    """
    for k in range(len(layout.entries)):
        gather_slice(layout, k, tensors, out)
    return out


def zero_padding(layout: FragmentLayout, flat: Tensor) -> None:
    """Set the padding of a flat fragment to zero."""
    ends = [entry.offset + entry.numel for entry in layout.entries]
    starts = [*(entry.offset for entry in layout.entries[1:]), layout.padded_numel]
    for end, start in zip(ends, starts, strict=True):
        flat[end:start].zero_()


def gather_slice(layout: FragmentLayout, k: int, tensors: Mapping[str, Tensor], out: Tensor) -> None:
    """Copy one slice like `gather`, and zero the padding up to the next one."""
    entry, following = layout.entries[k], layout.entries[k + 1 : k + 2]
    end, next_offset = entry.offset + entry.numel, following[0].offset if following else layout.padded_numel
    with torch.no_grad():
        entry.of(out).view(entry.shape).copy_(entry.slice.of(tensors[entry.slice.name]))
        if end < next_offset:
            out[end:next_offset].zero_()


def scatter(layout: FragmentLayout, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy a flat fragment into full parameters, in place, cast to their dtypes.

    Args:
        layout: the fragment's layout.
        flat: (P,) vector; its padding is ignored.
        tensors: full parameters by name; rows of other fragments are unchanged.
    """
    with torch.no_grad():
        for entry in layout.entries:
            entry.slice.of(tensors[entry.slice.name]).copy_(entry.of(flat).view(entry.shape))
