"""Runs a command that is killed when its parent process dies: `python leash.py PARENT_PID COMMAND...`.

1. Linux sends SIGKILL when the parent *thread* ends, so children must be started from the main thread.
2. The setting survives exec. It is made here and not in a preexec_fn, which may deadlock in a parent with threads.
3. If the parent died before the setting was made, nothing is run.
4. SIGINT is reset to its default. Background jobs of a shell ignore it, and their children would inherit that.

It runs as an isolated file, so that nothing else is imported. Source: prctl(2), PR_SET_PDEATHSIG.
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
