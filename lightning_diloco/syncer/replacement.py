"""New files of a whole run, which replace its files when they are complete.

1. The files are written to RUN_DIR/copy. Until `complete`, the run keeps its own files.
2. If the process dies while files are being replaced, `install` replaces the others.
"""

from __future__ import annotations

from pathlib import Path

from lightning_diloco.storage.files import make_directory, remove_tree, storage, sync_directory, write_file

OUTDATED = "syncer/outdated"
_PARTS = {
    "snapshot": "syncer/snapshot",
    "log": "syncer/log",
    "shards": "syncer/shards",
    "num_shards": "syncer/num_shards",
    "tape": "tape",
}
_COMPLETE = "complete"


def begin(run_dir: Path) -> Path:
    """Return RUN_DIR/copy, which is empty."""
    copy = run_dir / "copy"
    remove_tree(copy)
    make_directory(copy)
    return copy


def begin_log(directory: Path, lsn: int) -> None:
    """Write an empty log; lsn is that of its first record."""
    make_directory(directory)
    with storage("begin a log in", directory):
        write_file(directory / f"{lsn:020d}.log")


def complete(run_dir: Path) -> None:
    """Replace the files of the run. Raises `StorageError`."""
    copy = run_dir / "copy"
    with storage("complete the copy in", copy):
        for folder in [*(path for path in copy.rglob("*") if path.is_dir()), copy]:
            sync_directory(folder)
        write_file(copy / _COMPLETE)
        sync_directory(copy)
    install(run_dir)


def install(run_dir: Path) -> None:
    """Replace the run's files, if there is a complete set of new ones; call this again after a crash."""
    copy = run_dir / "copy"
    if (copy / _COMPLETE).exists():
        with storage("install the copy in", run_dir):
            for part, place in _PARTS.items():
                if (copy / part).exists():
                    if (run_dir / place).is_dir():
                        remove_tree(run_dir / place)
                    (copy / part).rename(run_dir / place)
            (run_dir / OUTDATED).unlink(missing_ok=True)
            sync_directory(run_dir / "syncer")
            sync_directory(run_dir)
    remove_tree(copy)
