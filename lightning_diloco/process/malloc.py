"""Limits the number of glibc's heaps, to save memory in the syncer.

glibc gives threads their own heaps, up to eight per core, and heaps do not share free memory. gRPC handles a payload in
any of its threads, so the process would grow until each heap has held the largest payload. Two heaps are enough for a
process that works mostly in one thread.

Source: mallopt(3), M_ARENA_MAX; the number is our choice.
"""

from __future__ import annotations

import ctypes
import sys

NUM_HEAPS = 2
_M_ARENA_MAX = -8


def keep_few_heaps() -> bool:
    """Limit the heaps. Call this before other threads start.

    Returns:
        Whether the allocator is glibc's, so that the limit was set.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, NUM_HEAPS))
