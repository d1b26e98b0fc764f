"""Reshard a fragment from boxes on several ranks to one range of the flat fragment per rank (an all-to-all).

1. Each rank sends every other rank the rows of its boxes that intersect that rank's range. Each value is sent once,
   except that a row on the border of two ranges is sent twice. No rank ever holds more than its own part and its own
   range.
2. If boxes of several ranks overlap (replicas), the values of the last rank are used, as in `part.assemble`.

Shapes: _P flat padded fragment, _L one rank's flat part, _R one rank's range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from lightning_diloco.devices.part import PartPlan, Piece


def dealt(plan: PartPlan, p: int, flat_L: Tensor, start: int, stop: int) -> Tensor:
    """Return the rows of a rank's part that intersect start..stop of the flat fragment; 1-D."""
    found = [
        piece.own.of(flat_L).view(_shape(piece))[first - _first(piece) : last - _first(piece)].reshape(-1)
        for piece, first, last in _reaching(plan, p, start, stop)
    ]
    return torch.cat(found) if found else flat_L[:0]


def num_dealt(plan: PartPlan, p: int, start: int, stop: int) -> int:
    """Return the number of values in `dealt`."""
    return sum((last - first) * prod(_shape(piece)[1:]) for piece, first, last in _reaching(plan, p, start, stop))


def gathered(plans: Sequence[PartPlan], p: int, found: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Assemble a range from the `dealt` values of all ranks: float32 (R,) on the host, zero padding."""
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
    """Yield the pieces that intersect the range, each with its first and last (exclusive) row in the range."""
    for piece in plan.pieces[p]:
        width = prod(piece.whole.shape[1:])
        first = max(_first(piece), (start - piece.whole.offset) // width)
        last = min(_first(piece) + _shape(piece)[0], -(-(stop - piece.whole.offset) // width))
        if start < stop and first < last:
            yield piece, first, last


def _bounds(piece: Piece, first: int, last: int) -> tuple[int, int]:
    """Return start and stop of whole rows of a slice in the flat fragment."""
    width = prod(piece.whole.shape[1:])
    return piece.whole.offset + first * width, piece.whole.offset + last * width


def _shape(piece: Piece) -> tuple[int, ...]:
    return piece.own.shape or (1,)


def _first(piece: Piece) -> int:
    return piece.starts[0] if piece.starts else 0
