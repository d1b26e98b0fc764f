"""The digest that compares the syncer's published values with the anchors on every device.

Shapes: _P flat padded fragment.
"""

from __future__ import annotations

import hashlib

from torch import Tensor


def digest(values_P: Tensor) -> str:
    """Return the SHA-256 of the raw bytes, padding included.

    Args:
        values_P: float32 (P,), contiguous, on the host.

    Returns:
        64 hex digits, equal if and only if all bits are equal.
    """
    return hashlib.sha256(values_P.detach().numpy().data).hexdigest()
