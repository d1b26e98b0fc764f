"""Find the directories of runs that this user served on this machine, and whether these runs are over.

A private folder holds a link for each run. With this link, a learner that finds no syncer can find out that the run has
ended.

Source: our choice.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from lightning_diloco.process.machine import private_folder


def note(run: str, run_dir: Path) -> None:
    """Record the directory of a run; errors are ignored."""
    with contextlib.suppress(OSError):
        link = private_folder() / f"{run}.run"
        link.unlink(missing_ok=True)
        link.symlink_to(run_dir.resolve())


def find(run: str) -> Path | None:
    """Return the directory of a run that this user served on this machine; None if it is unknown."""
    try:
        return Path(os.readlink(private_folder() / f"{run}.run"))
    except OSError:
        return None


def summary_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the latest summary of a run; None if it has none."""
    path = run_dir / "summary.json"
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def last_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the summary of a run that has finished or was stopped; None if it has none, or was served again since.

    Args:
        run_dir: RUN_DIR.
    """
    join, path = run_dir / "join", run_dir / "summary.json"
    if not path.exists() or (join.exists() and join.stat().st_mtime_ns > path.stat().st_mtime_ns):
        return None
    return summary_of(run_dir)


def is_over(run_dir: Path, run: str) -> bool:
    """Return whether a run has finished and its directory has not been served since then.

    Args:
        run_dir: RUN_DIR.
        run: run id.
    """
    summary = last_summary(run_dir) if (run_dir / "join").exists() else None
    return summary is not None and (summary["run"], summary["status"]) == (run, "finished")
