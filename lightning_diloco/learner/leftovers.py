"""What runs with an embedded syncer leave on disk: 12 to 15 bytes for each parameter, once they have finished.

1. The newest KEPT finished runs in a directory stay as they are: they can be exported, replayed and gone on with.
2. Of older ones, the next run removes the syncer's tensors and says so; summary and tape stay. Who wants to keep one
   moves its directory elsewhere.
3. A run that did not finish, or that somebody serves, is left alone; deleting its directory is all that it takes.

Source: our choice.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.storage.files import remove_tree
from lightning_diloco.storage.local_runs import is_over
from lightning_diloco.storage.log_reader import held

log = logging.getLogger(__name__)

KEPT = 3
_STATE = ("snapshot", "log", "contributions")


def tidy(folder: Path) -> None:
    """Remove the tensors of old finished runs; what cannot be removed is left.

    Args:
        folder: where run directories of embedded syncers lie.
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
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        return (run / "syncer" / "snapshot").is_dir() and is_over(run, summary["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # no run of ours


def _remove_state(run: Path) -> bool:
    try:
        with held(run / "syncer" / "log"):
            for name in _STATE:
                remove_tree(run / "syncer" / name)
    except (DiLoCoError, OSError) as error:
        log.warning("the syncer's tensors in %s were not removed: %s", run, error)
        return False
    return True
