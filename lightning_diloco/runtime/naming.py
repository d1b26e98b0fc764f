"""A learner without a name takes the first slot that is free on its host: `<hostname>-<slot>`.

1. A slot is taken by a lock on a file, which the system lets go of however the process ends: started again, a learner
   finds its slot free and has its old name. Within a process, slots are kept apart by a set.
2. The lock is of the kind that child processes do not inherit: a data worker that outlives its learner holds nothing.
3. Slots are counted per user and run.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import tempfile
import threading
from pathlib import Path

_taken: set[Path] = set()
_taking = threading.Lock()


class OwnName:
    """A name, taken until `release`.

    Args:
        run: run id.

    Attributes:
        name: a valid learner id.
    """

    def __init__(self, run: str) -> None:
        folder = Path(tempfile.gettempdir()) / f"diloco-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname().partition(".")[0])
        for slot in itertools.count():
            self._path = folder / f"{run}-{slot}.lock"
            self._fd = _locked(self._path)
            if self._fd is not None:
                break
        self.name = f"{host[:48].strip('-') or 'learner'}-{slot}"

    def release(self) -> None:
        """Others may have it; idempotent."""
        with _taking:
            fd, self._fd = self._fd, None
            if fd is not None:
                _taken.discard(self._path)
                os.close(fd)


def _locked(path: Path) -> int | None:
    """A descriptor that holds this file's lock; None if somebody else does."""
    with _taking:
        if path in _taken:  # opening and closing it would drop this process's own lock
            return None
        with contextlib.ExitStack() as undo:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            undo.callback(os.close, fd)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return None
            undo.pop_all()
        _taken.add(path)
        return fd
