"""Two learners never write to the same path.

The learner's directory is `<root>/learners/<id>`: root is DILOCO_RUN_DIR if set, else the Trainer's default_root_dir.

1. Done before Lightning looks for checkpoints to resume from, sets up callbacks and opens loggers; possible only if the
   id is known by then (strategy/identity.py). Without one nothing is moved: there is one learner only.
2. Explicit directories of file loggers and checkpoints get `learners/<id>` appended. In a run directory those below the
   working directory move below the learner's own, with the same relative path.
3. What already lies in the learner's directory is left alone: a launcher may start the process with
   PL_TRAINER_DEFAULT_ROOT_DIR, which Lightning reads itself.
4. A run that a learner begins by itself has a directory on a local disk, in `<root>/diloco`. It is temporary, and gone
   when the run has finished, where the root is elsewhere (a bucket), or where nothing is to be written at all: no root
   was given, and there is no logger and no checkpoint.
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

from lightning_diloco.learner.name import FINISHED
from lightning_diloco.storage import local_runs


class OwnPathsFirst(_Launcher):
    """Runs a Trainer's function in this process, after its paths were separated: no hook of a strategy is earlier.

    Args:
        separate: moves a Trainer's paths.
        sigterm_came: called in the handler of that signal.
    """

    def __init__(self, separate: Callable[[pl.Trainer], None], sigterm_came: Callable[[], None]) -> None:
        self._separate, self._sigterm_came = separate, sigterm_came

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks are fine: no process is started."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function."""
        if trainer is not None:
            self._separate(trainer)
        return function(*args, **kwargs)

    def kill(self, signum: int) -> None:
        """There is no other process; Lightning tells us that this one was asked to end."""
        self._sigterm_came()


def separate_paths(trainer: pl.Trainer, learner_id: str) -> None:
    """Move everything this Trainer writes into the learner's own directory; doing it twice changes nothing.

    Args:
        trainer: about to fit; loggers not yet opened.
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
    """Tell whoever started this learner in a run directory that its training is done: there, a file says so.

    Args:
        learner_id: of this learner.
    """
    if run_dir := os.environ.get("DILOCO_RUN_DIR"):
        folder = Path(run_dir, "learners", learner_id)
        if folder.is_dir():
            (folder / FINISHED).touch()


def run_root(trainer: pl.Trainer) -> Path | None:
    """The folder for a run that this learner begins, by rule 4; None: a temporary one."""
    root = trainer.default_root_dir
    if not _is_local_file_protocol(root):
        return None
    is_given = os.path.abspath(root) != os.getcwd()
    return Path(root) if is_given or trainer.loggers or trainer.checkpoint_callbacks else None


def checkpoint_url(chosen: str | None, own_run_dir: Path | None, root_dir: str, run: str) -> str:
    """Where the checkpoints of a run's learners lie: a folder or an fsspec URL.

    Args:
        chosen: by the user; has a folder for each run.
        own_run_dir: of the run that this learner began.
        root_dir: the Trainer's, for a run whose directory is on another machine; a folder or an fsspec URL.
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
    """The relative path, or None if it is elsewhere, such as in a bucket."""
    if "://" in path:
        return None
    below = os.path.relpath(os.path.realpath(path), os.path.realpath(os.curdir))
    return None if below.split(os.sep)[0] == os.pardir else below


def _is_inside(path: str, own: str) -> bool:
    """Whether the parts of `own` appear side by side in `path`."""
    parts, wanted = Path(path).parts, Path(own).parts
    return any(parts[k : k + len(wanted)] == wanted for k in range(len(parts)))
