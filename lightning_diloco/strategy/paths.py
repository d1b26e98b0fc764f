"""Two learners never write to the same path.

The learner's directory is `<root>/learners/<id>`: root is DILOCO_RUN_DIR if set, else the Trainer's default_root_dir.

1. Done before Lightning sets up callbacks and opens loggers; possible only if the id is known by then, from `learner=`
   or DILOCO_LEARNER. Without an id nothing is moved: file loggers then number their versions as between any two runs.
2. A launcher does better by starting the process with PL_TRAINER_DEFAULT_ROOT_DIR, which Lightning reads itself, and
   in time for ckpt_path="last". What already lies in the learner's directory is left alone.
3. Explicit directories of file loggers and ModelCheckpoint get `learners/<id>` appended.
"""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def separate_paths(trainer: pl.Trainer, learner_id: str) -> None:
    """Move everything this Trainer writes into the learner's own directory; doing it twice changes nothing.

    Args:
        trainer: about to fit; loggers not yet opened.
        learner_id: a valid learner id.
    """
    own = os.path.join("learners", learner_id)
    old_root = trainer.default_root_dir
    new_root = old_root if _is_inside(old_root, own) else os.path.join(_run_dir() or old_root, own)

    def moved(path: str) -> str:
        if _is_inside(path, own):
            return path
        return new_root if os.path.abspath(path) == os.path.abspath(old_root) else os.path.join(path, own)

    trainer._default_root_dir = new_root
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger._save_dir = logger._root_dir = moved(logger.save_dir)
        elif isinstance(logger, TensorBoardLogger):
            logger._root_dir = moved(logger.save_dir)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            callback.dirpath = moved(str(callback.dirpath))


def _run_dir() -> str | None:
    return os.environ.get("DILOCO_RUN_DIR") or None


def _is_inside(path: str, own: str) -> bool:
    """Whether the parts of `own` appear side by side in `path`."""
    parts, wanted = Path(path).parts, Path(own).parts
    return any(parts[k : k + len(wanted)] == wanted for k in range(len(parts)))
