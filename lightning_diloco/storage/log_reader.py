"""Reads a redo log that nobody writes, and changes nothing: a restart would cut a torn end off."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage.log_frames import Record, read_at, was_durable


def log_records(directory: Path, needed_lsn: int) -> Iterator[Record]:
    """All records of a log that nobody writes, as `RedoLog` reads them, but with nothing cut off.

    Raises:
        CorruptLogError: one that had been durable cannot be read, or those from needed_lsn on do not begin there.
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
                        return  # torn, as a crash may leave it, unless the tape knows better
                    raise _gap(f"{path} is damaged at byte {offset}", lsn)
                yield placed.record
                lsn, offset = lsn + 1, placed.end


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep syncers away while it is read."""
    if not directory.is_dir():
        raise StorageError(f"{directory} is not there; it is a part of every run directory; give RUN_DIR")
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise StorageError(
            f"{directory} is in use by a syncer; a run is replayed when it is over; stop it first"
        ) from error
    finally:
        os.close(fd)


def _gap(found: str, lsn: int) -> CorruptLogError:
    return CorruptLogError(f"{found}; there must be the record of lsn {lsn}; restore the log from a backup")
