"""A learner's own paths: two learners never write to the same path.

The learner's directory is `<root>/learners/<id>`: root is DILOCO_RUN_DIR if set, else the Trainer's default_root_dir.

1. Paths are changed before Lightning looks for checkpoints to resume from, sets up callbacks and opens loggers. The
   learner's id must be known by then (strategy/identity.py). Without an id, nothing is changed, because there is only
   one learner.
2. Explicit directories of file loggers and checkpoints get `learners/<id>` appended. In a run directory, directories
   below the working directory move below the learner's own directory, with the same relative path.
3. Paths in the learner's directory stay as they are: a launcher may start the process with
   PL_TRAINER_DEFAULT_ROOT_DIR, which Lightning reads itself.
4. A run that a learner begins by itself has a directory in `<root>/diloco`, on a local disk. If the root is not local
   (a bucket), the directory is temporary, and removed when the run has finished. The directory is also temporary if
   no root was given and there is neither a logger nor a checkpoint callback.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

from lightning_diloco.learner.name import FINISHED
from lightning_diloco.storage import local_runs


class OwnPathsFirst(_Launcher):
    """Separates a Trainer's paths, then runs its function in this process; no hook of a strategy runs earlier.

    Args:
        separate: separates a Trainer's paths.
        sigterm_came: the handler of SIGTERM calls this.
    """

    def __init__(self, separate: Callable[[pl.Trainer], None], sigterm_came: Callable[[], None]) -> None:
        self._separate, self._sigterm_came = separate, sigterm_came

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether this launcher works in notebooks; it does, because it starts no process."""
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Separate the paths and call the function."""
        if trainer is not None:
            self._separate(trainer)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: int) -> None:
        """Note that this process received SIGTERM; there is no other process to pass it on to."""
        self._sigterm_came()


def separate_paths(trainer: pl.Trainer, learner_id: str) -> None:
    """Move everything that this Trainer writes into the learner's own directory; idempotent.

    Args:
        trainer: a Trainer that is about to fit; its loggers are not open yet.
        learner_id: a valid learner id.
    """
    own = os.path.join("learners", learner_id)
    run_dir = os.environ.get("DILOCO_RUN_DIR")
    old_root = trainer.default_root_dir
    new_root = old_root if _is_inside(old_root, own) else os.path.join(run_dir or old_root, own)

    def moved(path: str) -> str:
        if _is_inside(path, own):
            return path
        if os.path.abspath(path) == os.path.abspath(old_root):
            return new_root
        below = _below_working_directory(path) if run_dir else None
        return os.path.join(path, own) if below is None else os.path.normpath(os.path.join(new_root, below))

    trainer._default_root_dir = new_root
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger._save_dir = logger._root_dir = moved(logger.save_dir)
        elif isinstance(logger, TensorBoardLogger):
            logger._root_dir = moved(logger.save_dir)
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "dirpath", None) is not None:
            callback.dirpath = moved(os.fspath(callback.dirpath))  # type: ignore[attr-defined]


def mark_finished(learner_id: str) -> None:
    """Write a file into the learner's folder to mark its training as done; only in a run directory.

    Args:
        learner_id: id of this learner.
    """
    if run_dir := os.environ.get("DILOCO_RUN_DIR"):
        folder = Path(run_dir, "learners", learner_id)
        if folder.is_dir():
            (folder / FINISHED).touch()


def run_root(trainer: pl.Trainer) -> Path | None:
    """Return the folder for a run that this learner begins; None for a temporary one (rule 4)."""
    root = trainer.default_root_dir
    if not _is_local_file_protocol(root):
        return None
    is_given = os.path.abspath(root) != os.getcwd()
    return Path(root) if is_given or trainer.loggers or trainer.checkpoint_callbacks else None


def checkpoint_url(chosen: str | None, own_run_dir: Path | None, root_dir: str, run: str) -> str:
    """Return the folder or fsspec URL of the checkpoints of a run's learners.

    Args:
        chosen: the user's choice, in which each run has a folder; None if there is none.
        own_run_dir: run directory, if this learner began the run.
        root_dir: root directory of the Trainer, a folder or an fsspec URL; used if the run directory is on another
            machine.
        run: run id.
    """
    if chosen is not None:
        return f"{chosen.rstrip('/')}/{run}"
    run_dir = own_run_dir or os.environ.get("DILOCO_RUN_DIR") or local_runs.find(run)
    if run_dir and os.path.isdir(run_dir):
        return os.path.abspath(os.path.join(run_dir, "checkpoints"))
    url = os.path.join(root_dir, "diloco-checkpoints", run)
    return os.path.abspath(url) if _is_local_file_protocol(url) else url


def _below_working_directory(path: str) -> str | None:
    """Return the path relative to the working directory; None if it is not below it."""
    if "://" in path:
        return None
    below = os.path.relpath(os.path.realpath(path), os.path.realpath(os.curdir))
    return None if below.split(os.sep)[0] == os.pardir else below


def _is_inside(path: str, own: str) -> bool:
    """Return whether the parts of `own` appear side by side in `path`."""
    parts, wanted = Path(path).parts, Path(own).parts
    return any(parts[k : k + len(wanted)] == wanted for k in range(len(parts)))
