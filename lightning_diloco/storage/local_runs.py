"""Runs that this user served on this machine: where their directories are, and whether they are over.

There is a link for each run, in a folder of the user's own.

A learner that finds no syncer learns from the run directory that the run has ended. Source: our choice.
"""

from __future__ import annotations

import contextlib
import json
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


def is_over(run_dir: Path, run: str) -> bool:
    """Whether this run has finished, and nobody has served its directory since.

    Args:
        run_dir: RUN_DIR.
        run: run id.
    """
    join, path = run_dir / "join", run_dir / "summary.json"
    if not (path.exists() and join.exists()) or path.stat().st_mtime_ns < join.stat().st_mtime_ns:
        return False
    summary = json.loads(path.read_text(encoding="utf-8"))
    return (summary["run"], summary["status"]) == (run, "finished")
