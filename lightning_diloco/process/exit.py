"""The end of a process whose threads still wait for other ranks, or whose work was lost.

1. Such a thread wakes up when a peer ends. If this happens during the shutdown of the interpreter, Python ends the
   thread inside C++ code, and the process aborts instead of returning its exit code.
2. So a script that ends with an exception skips the shutdown: after Python has printed the exception and all exit
   handlers have run, the process ends at once with Python's exit code 1.
3. A process whose exception is handled elsewhere, such as a spawned one, sets its exit code and ends the same way.
4. A process that handles the exception, exits with its own code or is interactive ends normally.
5. gloo's threads release tensors a moment after the waiting thread continues, which may abort the process in the same
   way. They end with their process group, but a sharded model keeps its group, so the process waits until they are
   idle.
6. If work was lost, a process may raise no error, so that its script can still save its model. It ends with exit code
   1, and logs the reason at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)

IDLE_S = 0.01
_TASKS = Path("/proc/self/task")  # otherwise the wait is 2 * IDLE_S
_codes: list[int] = []  # exit code of this process, if it is known
_reasons: list[str] = []  # reason of the exit code, if this process must log it


def arm_hard_exit() -> None:
    """Skip the shutdown of the interpreter after an exception, until `disarm_hard_exit` is called."""
    atexit.unregister(_end)
    atexit.register(_end)  # the handler that is registered last runs first


def hard_exit(code: int) -> None:
    """Skip the shutdown of the interpreter, and end with this code (rule 3)."""
    _codes[:] = [code]
    arm_hard_exit()


def fail_at_exit(reason: str) -> None:
    """End with exit code 1 although nothing is raised, and log the reason then (rule 6)."""
    _reasons[:] = [reason]
    hard_exit(1)


def take_back_failure() -> str | None:
    """Undo `fail_at_exit`; returns its reason, None if it was not called."""
    if not _reasons:
        return None
    _codes.clear()
    disarm_hard_exit()
    return _reasons.pop()


def disarm_hard_exit() -> None:
    """End the process normally again."""
    atexit.unregister(_end)


def _end() -> None:
    is_dying = isinstance(getattr(sys, "last_value", None), Exception) and not hasattr(sys, "ps1")
    if not (_codes or is_dying):
        return
    atexit.unregister(_end)
    for reason in _reasons:
        log.error("exit code 1: %s", reason)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(_codes[0] if _codes else 1)


def let_threads_become_idle(within_s: float = 2.0) -> None:
    """Wait until no other thread of this process computes or waits for the GIL.

    Args:
        within_s: time limit.
    """
    num_idle, until_s = 0, time.monotonic() + within_s
    while num_idle < 2 and time.monotonic() < until_s:
        time.sleep(IDLE_S)  # releases the GIL, so a thread that waited for it runs now or is done
        num_idle = 0 if _others_compute() else num_idle + 1


def _others_compute() -> bool:
    for path in _TASKS.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            state = path.read_text().rpartition(")")[2].split()[0]
            if state == "R" and path.parent.name != str(threading.get_native_id()):
                return True
    return False
