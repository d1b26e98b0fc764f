"""The run that a learner joins, and default learner ids: `<host>-<slot>`, with the first free slot of the machine.

1. A slot is held by a file lock, which the system releases when the process ends. So a restarted learner gets its old
   id again.
2. Child processes do not inherit the lock, so a data worker that outlives its learner does not hold the slot.
3. Slots are counted per user and run. A process holds at most one slot per run.
"""

from __future__ import annotations

import itertools
import os
import re
import socket

from lightning_diloco.config import LearnerConfig
from lightning_diloco.process.machine import lock_here
from lightning_diloco.transport.address import JoinAddress

FINISHED = "finished"  # a file that a learner leaves in its folder of the run directory when its training is done

_held: dict[str, str] = {}  # run -> name


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
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:48].lstrip("_-") or "host"
        slot = next(slot for slot in itertools.count() if lock_here(f"{run}.{slot}.lock"))
        _held[run] = f"{host}-{slot}"
    return _held[run]
