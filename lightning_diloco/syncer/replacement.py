"""New files of a whole run, or of one shard, which replace its files when they are complete.

1. The files are written to DIR/copy, where DIR is RUN_DIR or the directory of a shard. Until `complete`, the run keeps
   its own files.
2. If the process dies while files are being replaced, `install` replaces the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_diloco.storage.files import Buffer, make_directory, remove_tree, storage, sync_directory, write_file

OUTDATED = "syncer/outdated"
Parts = Mapping[str, str]  # place in DIR, by name in DIR/copy
OF_A_RUN: Parts = {
    "snapshot": "syncer/snapshot",
    "log": "syncer/log",
    "shards": "syncer/shards",
    "num_shards": "syncer/num_shards",
    "tape": "tape",
}
COPIED = "copied"
OF_A_SHARD: Parts = {"snapshot": "snapshot", "log": "log", COPIED: COPIED}
_COMPLETE = "complete"


def begin(directory: Path) -> Path:
    """Return DIR/copy, which is empty."""
    copy = directory / "copy"
    remove_tree(copy)
    make_directory(copy)
    return copy


def add(path: Path, content: Buffer = b"") -> None:
    """Write a file below DIR/copy. Raises `StorageError`."""
    make_directory(path.parent)
    with storage("write", path):
        write_file(path, content)


def begin_log(directory: Path, lsn: int) -> None:
    """Write an empty log; lsn is that of its first record."""
    add(directory / f"{lsn:020d}.log")


def complete(directory: Path, parts: Parts = OF_A_RUN) -> None:
    """Replace the files in DIR. Raises `StorageError`."""
    copy = directory / "copy"
    with storage("complete the copy in", copy):
        for folder in [*(path for path in copy.rglob("*") if path.is_dir()), copy]:
            sync_directory(folder)
        write_file(copy / _COMPLETE)
        sync_directory(copy)
    install(directory, parts)


def install(directory: Path, parts: Parts = OF_A_RUN) -> None:
    """Replace the files in DIR, if there is a complete set of new ones; call this again after a crash."""
    copy = directory / "copy"
    if (copy / _COMPLETE).exists():
        with storage("install the copy in", directory):
            for part, place in parts.items():
                if (copy / part).exists():
                    if (directory / place).is_dir():
                        remove_tree(directory / place)
                    (copy / part).rename(directory / place)
            (directory / OUTDATED).unlink(missing_ok=True)
            for folder in sorted({(directory / place).parent for place in parts.values()}, reverse=True):
                sync_directory(folder)
    remove_tree(copy)
