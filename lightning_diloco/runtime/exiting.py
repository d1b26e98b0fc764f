"""How a process ends whose threads still wait for other ranks.

1. Such a thread comes back when a peer ends, at any moment. If the interpreter is being taken down just then, Python
   ends the thread in the midst of C++ code, and the process aborts, whatever its exit code would have been.
2. So a script that dies of an exception, which Python has printed by then, ends as soon as everything that is
   registered for its exit has run: with exit code 1, as Python's own. Nothing of the interpreter is taken down.
3. A process that ends with a code because somebody else takes its exception, such as a spawned one, does likewise.
4. Who handles the exception, exits with a code of its own, or sits at a prompt ends as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

_codes: list[int] = []  # with which this process is about to end, if that is known


def end_at_once_if_dying() -> None:
    """This process may have threads that nothing can wake, until `end_as_ever`."""
    atexit.unregister(_end)
    atexit.register(_end)  # the last one registered runs first


def end_at_once_with(code: int) -> None:
    """This process is about to exit with this code, see rule 3."""
    _codes[:] = [code]
    end_at_once_if_dying()


def end_as_ever() -> None:
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
