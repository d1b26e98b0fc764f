"""Settings of glibc's allocator, to save memory in the syncer.

1. glibc gives threads their own heaps, up to eight per core, and heaps do not share free memory. gRPC handles a payload
   in any of its threads, so the process would grow until each heap has held the largest payload. Two heaps are enough
   for a process that works mostly in one thread.
2. Free memory in the middle of a heap stays with the process. Hundreds of connections that are closed leave 25 MiB.

Source: mallopt(3), M_ARENA_MAX; malloc_trim(3); the number is our choice.
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
    return bool(_call("mallopt", _M_ARENA_MAX, NUM_HEAPS))


def return_free_memory() -> bool:
    """Return free memory to the system. This takes milliseconds; other threads may have to wait for memory.

    Returns:
        Whether the allocator is glibc's, and had memory to return.
    """
    return bool(_call("malloc_trim", 0))


def _call(name: str, *numbers: int) -> int:
    """Call a function of glibc; return 0 if there is no such function."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return 0 if function is None else int(function(*numbers))
