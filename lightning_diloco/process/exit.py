"""How a process ends whose threads still wait for other ranks.

1. Such a thread comes back when a peer ends, at any moment. If the interpreter is being taken down just then, Python
   ends the thread in the midst of C++ code, and the process aborts, whatever its exit code would have been.
2. So a script that dies of an exception, which Python has printed by then, ends as soon as everything that is
   registered for its exit has run: with exit code 1, as Python's own. Nothing of the interpreter is taken down.
3. A process that ends with a code because somebody else takes its exception, such as a spawned one, does likewise.
4. Who handles the exception, exits with a code of its own, or sits at a prompt ends as ever.
5. gloo's threads let go of tensors a moment after whoever waited for them goes on, which aborts a process in the same
   way. They end with their groups, but not with those that a sharded model still holds: so these threads get the time
   to become idle.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from pathlib import Path

IDLE_S = 0.01
_TASKS = Path("/proc/self/task")  # where there is none, threads get twice IDLE_S
_codes: list[int] = []  # with which this process is about to end, if that is known


def arm_hard_exit() -> None:
    """This process may have threads that nothing can wake, until `disarm_hard_exit`."""
    atexit.unregister(_end)
    atexit.register(_end)  # the last one registered runs first


def hard_exit(code: int) -> None:
    """This process is about to exit with this code, see rule 3."""
    _codes[:] = [code]
    arm_hard_exit()


def disarm_hard_exit() -> None:
    """There are no such threads any more."""
    atexit.unregister(_end)


def _end() -> None:
    is_dying = isinstance(getattr(sys, "last_value", None), Exception) and not hasattr(sys, "ps1")
    if not (_codes or is_dying):
        return
    atexit.unregister(_end)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(_codes[0] if _codes else 1)


def let_threads_become_idle(within_s: float = 2.0) -> None:
    """Wait until no other thread of this process computes, or waits for the interpreter's lock.

    Args:
        within_s: at most.
    """
    num_idle, until_s = 0, time.monotonic() + within_s
    while num_idle < 2 and time.monotonic() < until_s:
        time.sleep(IDLE_S)  # lets go of the lock: who waited for it computes when this returns, or is done
        num_idle = 0 if _others_compute() else num_idle + 1


def _others_compute() -> bool:
    for path in _TASKS.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # that thread has ended
            state = path.read_text().rpartition(")")[2].split()[0]
            if state == "R" and path.parent.name != str(threading.get_native_id()):
                return True
    return False
