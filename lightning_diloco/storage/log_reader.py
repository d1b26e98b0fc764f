"""Reads a redo log without changing it, while no syncer uses it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage.files import lock_directory
from lightning_diloco.storage.log_frames import Record, read_at, was_durable


def log_records(directory: Path, needed_lsn: int) -> Iterator[Record]:
    """Yield all records of a log. Unlike `RedoLog`, this does not cut off a torn end.

    Raises:
        CorruptLogError: a durable record is damaged, or the log starts after needed_lsn.
    """
    paths = sorted(directory.glob("*.log"))
    lsn = int(paths[0].stem) if paths else needed_lsn
    if lsn > needed_lsn:
        raise _gap(f"{directory} begins at lsn {lsn}", needed_lsn)
    for path in paths:
        if int(path.stem) != lsn:
            raise _gap(f"{path} begins at lsn {int(path.stem)}", lsn)
        with path.open("rb") as file:
            fd, size, offset = file.fileno(), os.fstat(file.fileno()).st_size, 0
            while offset < size:
                placed = read_at(fd, offset, size)
                if placed is None or placed.record.lsn != lsn:
                    if path == paths[-1] and not was_durable(fd, offset, size, lsn):
                        return  # a torn end, left by a crash; the caller compares with the tape
                    raise _gap(f"{path} is damaged at byte {offset}", lsn)
                yield placed.record
                lsn, offset = lsn + 1, placed.end


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Lock the log against syncers during the block."""
    if not directory.is_dir():
        raise StorageError(f"{directory} does not exist; a run directory must have it; give RUN_DIR")
    if (fd := lock_directory(directory, shared=True)) is None:
        raise StorageError(
            f"{directory} is in use by a syncer; replay needs a run that is not served; stop the syncer first"
        )
    try:
        yield
    finally:
        os.close(fd)


def _gap(found: str, lsn: int) -> CorruptLogError:
    return CorruptLogError(f"{found}; there must be the record of lsn {lsn}; restore the log from a backup")
