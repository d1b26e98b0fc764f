"""Where a run lives on this machine, for who has nothing but its join string: a link per run, in the user's own folder.

A learner that finds no syncer learns from the run directory that the run has ended. Source: our choice.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def note(run: str, run_dir: Path) -> None:
    """This run is served from this directory; that it cannot be noted harms nobody."""
    with contextlib.suppress(OSError):
        _folder().mkdir(mode=0o700, exist_ok=True)
        link = _folder() / f"{run}.run"
        link.unlink(missing_ok=True)
        link.symlink_to(run_dir.resolve())


def find(run: str) -> Path | None:
    """The directory of a run that this user served on this machine; None: none is known."""
    try:
        return Path(os.readlink(_folder() / f"{run}.run"))
    except OSError:
        return None


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"lightning_diloco-{os.getuid()}"
