"""Locks a run directory, so that a second `diloco run` is refused before it starts anything.

The operating system releases the lock when the process ends, also after a crash. Source: our choice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_diloco.errors import ConfigError
from lightning_diloco.storage.files import lock_directory


@contextmanager
def claimed(run_dir: Path, *, is_served: bool = False) -> Iterator[None]:
    """Lock a run directory for the duration of the block.

    Args:
        run_dir: RUN_DIR, which must exist.
        is_served: whether its syncer may run already.

    Raises:
        ConfigError: another `diloco run` or a syncer uses it.
    """
    claim = lock_directory(run_dir)
    log = run_dir / "syncer" / "log"
    syncers = lock_directory(log) if claim is not None and log.is_dir() and not is_served else claim
    try:
        if claim is None or syncers is None:
            who = "`diloco run`" if claim is None else "syncer"
            raise ConfigError(
                f"{run_dir} is in use by another {who}, and a run directory can serve only one; inspect it with "
                f"`diloco status {run_dir}`, wait for it to end or stop it, or choose another directory with --run-dir"
            )
        if syncers != claim:
            os.close(syncers)  # our own syncer needs it
        yield
    finally:
        if claim is not None:
            os.close(claim)


def is_claimed(run_dir: Path) -> bool:
    """Return whether a `diloco run` uses this run directory."""
    claim = lock_directory(run_dir)
    if claim is not None:
        os.close(claim)
    return claim is None
