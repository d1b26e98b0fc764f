"""The pseudo-gradient of a learner: the stored anchor minus its parameters.

The anchor is float32, but parameters may have another dtype. The pseudo-gradient is the difference from the value that
the last landing really stored, cast(anchor). A learner that trained zero steps therefore contributes exactly zero, also
in bf16.

Shapes: _P flat fragment.
Source: arXiv 2604.21428 (a descent direction, which the outer step subtracts); the cast is our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_diloco.core.layout import FragmentLayout


def store_cast(layout: FragmentLayout, anchor: Tensor, dtypes: Sequence[torch.dtype], out: Tensor) -> Tensor:
    """Compute the parameter values that an anchor gives when it lands, as float32.

    Args:
        layout: the fragment's layout.
        anchor: (P,) float32.
        dtypes: dtypes of the parameters, one per entry of the layout.
        out: (P,) float32, overwritten; may be anchor itself.

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
    """Compute cast(anchor) - local in float32.

    Args:
        anchor: (P,) float32, cast to the dtype of local. If the parameters have several dtypes, pass the result of
            `store_cast` and gather local as float32.
        local: (P,) gathered parameters, any float dtype.
        out: (P,) float32, overwritten.

    Returns:
        out.
    """
    return torch.sub(anchor.to(local.dtype).float(), local.float(), out=out)
