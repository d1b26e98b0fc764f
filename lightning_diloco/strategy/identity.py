"""Which learner this process is.

1. `learner=` wins over DILOCO_LEARNER. Who joins a run without either is `<host>-<slot>`: the first slot that no other
   process of this machine holds in that run, so that one started again is the same learner.
2. Who starts a run of its own shares no path with anybody, and needs no name yet: the link gives it one.
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

_held: dict[str, tuple[str, int]] = {}  # run -> id, and the open lock file: a process is one learner of a run


def learner_id(config: LearnerConfig) -> str | None:
    """The id known before the run is joined, or None.

    Raises:
        ConfigError: the join string is not one.
    """
    name = config.learner or os.environ.get("DILOCO_LEARNER")
    join = config.join or os.environ.get("DILOCO_JOIN")
    return name or (_slot_in(JoinAddress.parse(join).run) if join else None)


def _slot_in(run: str) -> str:
    if run not in _held:
        folder = Path(tempfile.gettempdir()) / f"lightning_diloco-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:48].lstrip("_-") or "host"
        slots = ((f"{host}-{slot}", folder / f"{run}.{slot}.lock") for slot in itertools.count())
        _held[run] = next((name, lock) for name, path in slots if (lock := _locked(path)) is not None)
    return _held[run][0]


def _locked(path: Path) -> int | None:
    """An exclusive lock, which ends with this process; None if another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
