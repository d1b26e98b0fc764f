"""A run directory is one `diloco run`'s at a time: a second one is refused before it starts anything.

The claim is a lock on the directory, which the system lets go of however the process ends. Source: our choice.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_diloco.errors import ConfigError


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold a run directory while the block lasts.

    Args:
        run_dir: RUN_DIR; it exists.

    Raises:
        ConfigError: another `diloco run` or a syncer works in it.
    """
    claim = _locked(run_dir)
    log = run_dir / "syncer" / "log"
    syncers = _locked(log) if claim is not None and log.is_dir() else claim
    try:
        if claim is None or syncers is None:
            who = "`diloco run`" if claim is None else "syncer"
            raise ConfigError(
                f"{run_dir} is in use by another {who}, and a run directory serves one at a time; look at it with "
                f"`diloco status {run_dir}`, wait for its end or stop it, or choose another directory with --run-dir"
            )
        if syncers != claim:
            os.close(syncers)  # our own syncer needs it
        yield
    finally:
        if claim is not None:
            os.close(claim)


def _locked(folder: Path) -> int | None:
    """The open folder, held against other processes; None: another one holds it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return None
    return opened
