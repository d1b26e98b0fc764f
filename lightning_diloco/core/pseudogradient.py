"""What a learner contributes: the stored anchor minus its parameters.

The anchor is float32, a parameter may not be. Progress is measured against the value that was really stored at the last
landing, cast(anchor): a learner that trained zero steps contributes exactly zero, in bf16 as well.

Shapes: _P flat fragment.
Source: arXiv 2604.21428 (a descent direction, so the outer step subtracts it); the cast is our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_diloco.core.layout import FragmentLayout


def store_cast(layout: FragmentLayout, anchor: Tensor, dtypes: Sequence[torch.dtype], out: Tensor) -> Tensor:
    """The values that the parameters take when this anchor lands, as float32.

    Args:
        layout: of the fragment.
        anchor: (P,) float32.
        dtypes: of the parameters, one for each entry of the layout.
        out: (P,) float32 to write into; may be anchor itself.

    Returns:
        out.
    """
    if out is not anchor:
        out.copy_(anchor)
    for entry, dtype in zip(layout.entries, dtypes, strict=True):
        if dtype != torch.float32:
            stored = entry.of(out)
            stored.copy_(stored.to(dtype))
    return out


def pseudo_gradient(anchor: Tensor, local: Tensor, out: Tensor) -> Tensor:
    """cast(anchor) - local, in float32.

    Args:
        anchor: (P,) float32, cast to the dtype of local here. For parameters of several dtypes pass the result of
            `store_cast`, and local gathered as float32.
        local: (P,) gathered parameters, any float dtype.
        out: (P,) float32 to write into.

    Returns:
        out.
    """
    return torch.sub(anchor.to(local.dtype).float(), local.float(), out=out)
