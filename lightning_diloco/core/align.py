"""Landing of a new anchor in the parameters.

The rules differ in how they treat the steps trained while the round was in flight:

    carry      cast( (cast(A_new) + sent) + (param - cast(A_old)) )     keeps them
    overwrite  cast(A_new)                                              drops them, the paper's rule
    blend      cast( alpha * param + (1 - alpha) * cast(A_new) )        Streaming DiLoCo

1. Progress is param - anchor. `sent` is the decoded contribution if this update merged it, else zero. A landing removes
   the merged part from the progress and keeps the rest, including the quantization error.
2. If a parameter equals cast(A_old) and nothing was sent, it becomes cast(A_new) bit for bit. A_new - A_old is
   therefore never added to a parameter, because this difference is rounded and the sum can miss A_new.
3. If A_new is a single addition, A_old + update, a float32 parameter gets the same addition: param + (update + sent).
   This keeps rule 2, rounds no more than carry, and moves a quarter less memory, which is the whole cost of a landing.
4. A float64 parameter lands in float64 and keeps the precision that float32 anchors and contributions do not have.

Source: carry as in LOSCAR-SGD (arXiv 2605.20866); overwrite: arXiv 2604.21428; blend: arXiv 2501.18512.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Three float32 chunks of this size stay in a CPU's cache between the two passes; smaller ones cost more per call.
LANDING_CHUNK_NUMEL = 1 << 17

# Dtypes that store a float32 exactly; parameters of other dtypes are landed through float32.
WIDE_DTYPES = (torch.float32, torch.float64)


def land_carry_(param_view: Tensor, base: Tensor, old: Tensor) -> None:
    """Compute param <- cast(base + (param - old)) in place.

    A float32 or float64 parameter serves as its own scratch, in two passes of one call each, because calls for small
    pieces would cost more than a second read. Other dtypes go through float32 in pieces that stay in the cache.

    Args:
        param_view: contiguous, any shape; a parameter or some of its rows.
        base: as many float32 values: cast(anchor_new), plus the decoded contribution if the update has merged it.
        old: as many float32 values, cast(anchor_old); see `store_cast`.
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
    """Compute params <- params + moves in place (rule 3).

    This is one call for all parameters, because a thread must reacquire the GIL between calls while other threads may
    hold it.

    Args:
        params: float32 or float64, parameters or some of their rows, any memory format; may be empty on a rank.
        moves: update + sent for each parameter, float32 of the same shape.
    """
    assert all(param.dtype in WIDE_DTYPES for param in params), "cast(A_new) is not the sum of the cast values"
    if params:  # _foreach_add_ refuses empty lists
        with torch.no_grad():
            torch._foreach_add_(list(params), list(moves))


def landing_pieces(param: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the pieces of a flat parameter, each with a float32 (or float64) scratch buffer of its size.

    On a CPU, pieces stay in the cache. On an accelerator there is one piece, because there is no such cache and each
    call costs the training thread more.
    """
    whole = LANDING_CHUNK_NUMEL if param.device.type == "cpu" else param.numel()
    step = max(1, min(whole, param.numel()))
    wide = torch.promote_types(param.dtype, torch.float32)
    scratch = torch.empty(step, dtype=wide, device=param.device)
    for start in range(0, param.numel(), step):
        part = slice(start, min(start + step, param.numel()))
        yield part, scratch[: part.stop - start]
