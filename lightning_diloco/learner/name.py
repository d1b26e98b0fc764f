"""The run that a learner is to join, and default learner ids: `<host>-<slot>`, the first free slot of the machine.

1. A slot is held by a file lock, which the system releases when the process ends. So a restarted learner gets its old
   id again.
2. Child processes do not inherit the lock, so a data worker that outlives its learner does not hold the slot.
3. Slots are counted per user and run. A process holds at most one slot per run.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
import tempfile
from pathlib import Path

from lightning_diloco.config import LearnerConfig
from lightning_diloco.transport.address import JoinAddress

FINISHED = "finished"  # a file that a learner leaves in its folder of the run directory when its training is done

_held: dict[str, tuple[str, int]] = {}  # run -> name, and the open lock file


def given_address(learner: LearnerConfig) -> JoinAddress | None:
    """Return the address of a run that others have started; None if this learner starts a run.

    Raises:
        ConfigError: the join string is malformed or empty.
    """
    text = os.environ.get("DILOCO_JOIN") if learner.join is None else learner.join
    return None if text is None else JoinAddress.parse(text)


def own_name(run: str) -> str:
    """Return this process's default learner id in a run, which never changes during the process.

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
    """Lock a file until the process ends; returns the descriptor, or None if another process holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(lock)
        return None
    return lock
