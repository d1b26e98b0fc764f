"""A fragment that lies in boxes on several ranks, dealt out anew: to each rank a range of the flat fragment.

1. A rank sends to every other one what its boxes hold of that rank's range, whole rows of boxes. So each value travels
   once, and a row at the border of two ranges twice. No rank ever holds more than its part and its range.
2. Where boxes of several ranks overlap (replicas), the last rank's values are taken, as in `part.assemble`.

Shapes: _P flat padded fragment, _L flat part of it, _R range of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from lightning_diloco.devices.part import PartPlan, Piece


def dealt(plan: PartPlan, p: int, flat_L: Tensor, start: int, stop: int) -> Tensor:
    """What a rank's part holds of start..stop of the flat fragment, by rows; 1-D."""
    found = [
        piece.own.of(flat_L).view(_shape(piece))[first - _first(piece) : last - _first(piece)].reshape(-1)
        for piece, first, last in _reaching(plan, p, start, stop)
    ]
    return torch.cat(found) if found else flat_L[:0]


def num_dealt(plan: PartPlan, p: int, start: int, stop: int) -> int:
    """Values in `dealt`."""
    return sum((last - first) * prod(_shape(piece)[1:]) for piece, first, last in _reaching(plan, p, start, stop))


def gathered(plans: Sequence[PartPlan], p: int, found: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """A range of what all ranks have `dealt`, padding with zeros: float32 (R,) on the host."""
    reaching = [list(_reaching(plan, p, start, stop)) for plan in plans]
    bounds = [bound for each in reaching for piece, first, last in each for bound in _bounds(piece, first, last)]
    begin = min([start, *bounds])
    out = torch.zeros(max([stop, *bounds]) - begin)
    for pieces, values in zip(reaching, found, strict=True):
        rest = values
        for piece, first, last in pieces:
            low, high = _bounds(piece, first, last)
            view = out[low - begin : high - begin].view(last - first, *piece.whole.shape[1:])
            for dim, (at, size) in enumerate(zip(piece.starts[1:], _shape(piece)[1:], strict=True), start=1):
                view = view.narrow(dim, at, size)
            own, rest = rest[: view.numel()], rest[view.numel() :]
            view.copy_(own.view(view.shape))
    return out[start - begin : stop - begin]


def _reaching(plan: PartPlan, p: int, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
    """Pieces with rows that reach into the range, and which rows of the slice these are."""
    for piece in plan.pieces[p]:
        width = prod(piece.whole.shape[1:])
        first = max(_first(piece), (start - piece.whole.offset) // width)
        last = min(_first(piece) + _shape(piece)[0], -(-(stop - piece.whole.offset) // width))
        if start < stop and first < last:
            yield piece, first, last


def _bounds(piece: Piece, first: int, last: int) -> tuple[int, int]:
    """Where whole rows of a slice lie in the flat fragment."""
    width = prod(piece.whole.shape[1:])
    return piece.whole.offset + first * width, piece.whole.offset + last * width


def _shape(piece: Piece) -> tuple[int, ...]:
    return piece.own.shape or (1,)


def _first(piece: Piece) -> int:
    return piece.starts[0] if piece.starts else 0
