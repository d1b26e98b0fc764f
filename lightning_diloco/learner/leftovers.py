"""Removes old tensors of finished runs with an embedded syncer, which take 12 to 15 bytes per parameter.

1. The newest KEPT finished runs in a directory are kept. They can be exported, replayed and continued.
2. The next run removes the syncer's tensors of older runs, with a warning. Summary and tape stay. To keep a run, move
   its directory elsewhere.
3. Runs that have not finished, or that are being served, are left alone. Users can delete their directories.

Source: our choice.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.storage.files import remove_tree
from lightning_diloco.storage.local_runs import is_over, summary_of
from lightning_diloco.storage.redo_log import held

log = logging.getLogger(__name__)

KEPT = 3
_STATE = ("snapshot", "log", "contributions")


def tidy(folder: Path) -> None:
    """Remove the tensors of old finished runs, if possible.

    Args:
        folder: folder with the run directories of embedded syncers.
    """
    runs = [run for run in folder.glob("*") if _has_finished(run)]
    old = sorted(runs, key=lambda run: (run / "summary.json").stat().st_mtime)[:-KEPT]
    removed = [run.name for run in old if _remove_state(run)]
    if removed:
        log.warning(
            "removed the syncer's tensors of %d finished runs in %s (%s); the newest %d stay, as do all summaries; "
            "move a run's directory elsewhere to keep it",
            len(removed), folder, ", ".join(removed), KEPT,
        )  # fmt: skip


def _has_finished(run: Path) -> bool:
    try:
        return (run / "syncer" / "snapshot").is_dir() and is_over(run, (summary_of(run) or {})["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not a run directory


def _remove_state(run: Path) -> bool:
    try:
        with held(run / "syncer" / "log", shared=False):
            for name in _STATE:
                remove_tree(run / "syncer" / name)
    except (DiLoCoError, OSError) as error:
        log.warning("the syncer's tensors in %s were not removed: %s", run, error)
        return False
    return True
