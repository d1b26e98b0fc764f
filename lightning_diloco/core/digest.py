"""One fingerprint of tensors for all: the syncer's published values and every device's anchors are compared by it.

Shapes: _P flat padded fragment.
"""

from __future__ import annotations

import hashlib

from torch import Tensor


def digest(values_P: Tensor) -> str:
    """SHA-256 of the raw bytes, padding included.

    Args:
        values_P: float32 (P,), contiguous, on the host.

    Returns:
        64 hex digits, equal exactly if all bits are.
    """
    return hashlib.sha256(values_P.detach().numpy().data).hexdigest()
