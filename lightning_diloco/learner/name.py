"""A learner without a name takes the first slot that is free on its machine: `<host>-<slot>`.

1. A slot is held by a lock on a file, which the system lets go of however the process ends: started again, a learner
   finds its slot free and has its old name.
2. The lock is of the kind that child processes do not inherit: a data worker that outlives its learner holds nothing.
3. Slots are counted per user and run. A process is one learner of a run, so it holds at most one slot of each.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
import tempfile
from pathlib import Path

FINISHED = "finished"  # a file that a learner leaves in its folder of the run directory when its training is done

_held: dict[str, tuple[str, int]] = {}  # run -> name, and the open lock file


def own_name(run: str) -> str:
    """This process's name in a run, a valid learner id; the same for the life of the process.

    Args:
        run: run id.
    """
    if run not in _held:
        folder = Path(tempfile.gettempdir()) / f"lightning_diloco-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:48].lstrip("_-") or "host"
        slots = ((f"{host}-{slot}", folder / f"{run}.{slot}.lock") for slot in itertools.count())
        _held[run] = next((name, lock) for name, path in slots if (lock := _locked(path)) is not None)
    return _held[run][0]


def _locked(path: Path) -> int | None:
    """A descriptor whose lock ends with this process; None if another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(lock)
        return None
    return lock
