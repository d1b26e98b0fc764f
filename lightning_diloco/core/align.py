"""The landing of a new anchor in the parameters: what becomes of the steps trained while the round was in flight.

    carry      cast( (cast(A_new) + sent) + (param - cast(A_old)) )     keeps them
    overwrite  cast(A_new)                                              drops them, the paper's rule
    blend      cast( alpha * param + (1 - alpha) * cast(A_new) )        Streaming DiLoCo

1. Progress is param - anchor. `sent` is the decoded contribution if this update merged it, else nothing: what was
   merged leaves the progress, all else stays in it, the quantization error included.
2. A parameter that equals cast(A_old), with nothing sent, becomes cast(A_new) bit for bit. So A_new - A_old is never
   added to a parameter: it is rounded, and the sum can miss A_new.
3. Where one addition made A_new, A_old + update, a float32 parameter takes the same one: param + (update + sent). It
   keeps rule 2, rounds no more than carry, and moves a quarter less memory: a landing costs nothing else.

4. A float64 parameter is landed in float64: it keeps all that the float32 of anchors and contributions does not hold.

Source: carry as in LOSCAR-SGD (arXiv 2605.20866); overwrite: arXiv 2604.21428; blend: arXiv 2501.18512.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Three float32 chunks of this size stay in a CPU's cache between the two passes; smaller ones pay more per call.
LANDING_CHUNK_NUMEL = 1 << 17

# Parameters that store a float32 as it is; others go through float32.
WIDE_DTYPES = (torch.float32, torch.float64)


def landing_base(anchor_new: Tensor, dtype: torch.dtype, sent: Tensor | None = None) -> Tensor:
    """cast(anchor_new) + sent in float32: the part of carrying that does not depend on the parameter.

    The link thread computes it ahead, so that the training thread is left with `land_carry_`.

    Args:
        anchor_new: float32.
        dtype: of the parameter.
        sent: of that shape, float32: the decoded contribution, if the update names it as merged; else None.
    """
    stored = anchor_new.to(dtype).float()
    return stored if sent is None else stored + sent


def land_carry_(param_view: Tensor, base: Tensor, old: Tensor) -> None:
    """param <- cast(base + (param - old)), in place.

    A float32 (or float64) parameter is its own scratch: two passes, with two calls, as a small piece costs more to call
    for than to read again. Others go through float32 in pieces that stay in the cache.

    Args:
        param_view: contiguous, any shape: a parameter or some of its rows.
        base: as many float32 values, from `landing_base`.
        old: as many float32 values: cast(anchor_old), see `store_cast`.
    """
    with torch.no_grad():
        flat_param, flat_base, flat_old = param_view.detach().view(-1), base.reshape(-1), old.reshape(-1)
        if param_view.dtype in WIDE_DTYPES:
            flat_param.sub_(flat_old).add_(flat_base)
            return
        for part, scratch in landing_pieces(flat_param):
            progress = scratch.copy_(flat_param[part]).sub_(flat_old[part])
            flat_param[part].copy_(progress.add_(flat_base[part]))


def land_added_(params: Sequence[Tensor], moves: Sequence[Tensor]) -> None:
    """params <- params + moves, in place: rule 3 above.

    One call for all of them: between two calls a thread needs the interpreter's lock again, which others may hold.

    Args:
        params: float32 or float64, parameters or some of their rows, of any memory format; of a rank, perhaps none.
        moves: update + sent of each, of its shape, float32.
    """
    assert all(param.dtype in WIDE_DTYPES for param in params), "cast(A_new) is no sum of what was cast"
    if params:  # which torch insists on
        with torch.no_grad():
            torch._foreach_add_(list(params), list(moves))


def landing_pieces(param: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """What to land next of a flat parameter, and float32 (or float64) room for as many values.

    Pieces stay in a cache of the CPU. An accelerator has none to stay in, and each call costs the training thread more:
    it is one piece.
    """
    whole = LANDING_CHUNK_NUMEL if param.device.type == "cpu" else param.numel()
    step = max(1, min(whole, param.numel()))
    wide = torch.promote_types(param.dtype, torch.float32)
    scratch = torch.empty(step, dtype=wide, device=param.device)
    for start in range(0, param.numel(), step):
        part = slice(start, min(start + step, param.numel()))
        yield part, scratch[: part.stop - start]
