"""How many heaps the allocator keeps: a syncer's payloads pass through whichever of gRPC's threads is free.

glibc gives threads heaps of their own, up to eight for each core, and none gives memory back to another: a process that
does the same thing all the time grows until each has held the largest payload once. Two are enough for a process whose
work is one thread's.

Source: mallopt(3), M_ARENA_MAX; the number is our choice.
"""

from __future__ import annotations

import ctypes
import sys

NUM_HEAPS = 2
_M_ARENA_MAX = -8


def keep_few_heaps() -> bool:
    """To be called before there are other threads.

    Returns:
        Whether it was done: other allocators than glibc's are left alone.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, NUM_HEAPS))
