"""Becomes the given command, which then dies with the process that started it: `python leash.py PARENT_PID COMMAND...`.

1. Linux sends SIGKILL to a process whose parent *thread* ended; so children are started from the main thread only.
2. The request survives exec and is made here, not in a preexec_fn, which may deadlock in a parent that has threads.
3. The parent may have died before the request was made: then nothing is run.
4. SIGINT gets its default meaning back; a shell's background job ignores it, and so would all its children.

Run as a file, isolated, so that nothing else is imported. Source: prctl(2), PR_SET_PDEATHSIG.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then replace it by the command."""
    parent_pid, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(parent_pid):
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
