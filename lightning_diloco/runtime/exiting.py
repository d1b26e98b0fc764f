"""How a process ends whose threads still wait for other ranks.

1. Such a thread comes back when a peer ends, at any moment. If the interpreter is being taken down just then, Python
   ends the thread in the midst of C++ code, and the process aborts, whatever its exit code would have been.
2. So a script that dies of an exception, which Python has printed by then, ends as soon as everything that is
   registered for its exit has run: with exit code 1, as Python's own. Nothing of the interpreter is taken down.
3. Who handles the exception, exits with a code of its own, or sits at a prompt ends as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


def end_at_once_if_dying() -> None:
    """This process has threads that nothing can wake; to be called when the error is known."""
    atexit.unregister(_end)
    atexit.register(_end)  # the last one registered runs first


def _end() -> None:
    if not isinstance(getattr(sys, "last_value", None), Exception) or hasattr(sys, "ps1"):
        return
    atexit.unregister(_end)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(1)
