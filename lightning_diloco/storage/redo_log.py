"""The redo log: what the syncer decided, on disk before anybody is told.

1. Records carry consecutive log sequence numbers (lsn), from 1 on. `append` writes, `sync` makes durable.
2. A record counts if it is whole: checksums cover every byte of it. The log ends before the first one that is not.
3. Every record says how far the log was durable when it was written. A damaged record that a later one knows to have
   been durable is corruption and stops the restart; any other is the torn end of a crash: cut off, and reported.
4. A segment is named by its first lsn. The next one is created only after this one is durable, so damage in any segment
   but the last is corruption. An empty last segment keeps the lsn when all others were dropped.
5. An append or sync that fails leaves the log as it was, and the next one tries again.
6. One process at a time: the directory is locked until `close` or the end of the process.

Source: our choice; the rules are those of write-ahead logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage.files import (
    AppendFile,
    Buffer,
    Faults,
    make_directory,
    no_faults,
    storage,
    sync_directory,
)
from lightning_diloco.storage.log_frames import Record, encode, read_at, was_durable

__all__ = ["Record", "RedoLog"]


class RedoLog:
    """An append-only log of JSON headers with raw payloads; safe to use from several threads.

    Opening reads and checks the whole log, and cuts a torn end off.

    Args:
        directory: created if it is not there.
        faults: called at "append:before", "append:after_header", "append:after_payload", "sync:before", "sync:after",
            "rotate:before", "rotate:after_create" and "drop:before", for tests that fail or crash there.
        locked: called when the directory is this process's, before the log is read.
        tell: told in words how far opening is.

    Attributes:
        torn_bytes: what was cut off at opening.
        last_lsn: of the last record appended; 0 if there never was one.
        durable_lsn: of the last record known to be on disk.

    Raises:
        CorruptLogError: a record that had been durable cannot be read.
        StorageError: the directory cannot be used, or another process uses it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        faults: Faults = no_faults,
        locked: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.directory = Path(directory)
        self._faults = faults
        self._tell = tell
        self._mutex = threading.RLock()
        make_directory(self.directory)
        with contextlib.ExitStack() as undo:
            self._lock_fd = _lock_directory(self.directory)
            undo.callback(os.close, self._lock_fd)
            locked()
            self._segments = self._find_segments()
            self._active = AppendFile(self._path(self._segments[-1]), faults=faults)
            undo.callback(self._active.close)
            self.last_lsn, end = self._check_segments()
            self.torn_bytes = self._active.end - end
            # Also without a torn end: what a killed process left in the page cache counts from now on.
            self._active.cut(end)
            undo.pop_all()
        self.durable_lsn = self.last_lsn

    @property
    def first_lsn(self) -> int:
        """The oldest lsn still kept; `last_lsn + 1` if no record is."""
        return self._segments[0]

    @property
    def nbytes(self) -> int:
        """Size of all segments."""
        with self._mutex:
            return sum(self._path(first).stat().st_size for first in self._segments[:-1]) + self._active.end

    def append(self, header: Mapping[str, object], payload: Buffer = b"") -> int:
        """Write one record; it may be told to anybody once `sync` returned.

        Args:
            header: a JSON object with finite numbers.
            payload: contiguous bytes of any kind.

        Returns:
            The record's lsn.

        Raises:
            StorageError: the disk did not take it; the log is as before.
        """
        with self._mutex:
            lsn = self.last_lsn + 1
            self._active.append(self._pieces(*encode(lsn, self.durable_lsn, header, payload)))
            self.last_lsn = lsn
            return lsn

    def sync(self) -> int:
        """Make all appended records durable.

        Returns:
            The last durable lsn.

        Raises:
            StorageError: the disk failed; all records since the last good sync are taken back, their lsns free again.
        """
        with self._mutex:
            if self.durable_lsn < self.last_lsn:
                try:
                    self._active.sync()
                except StorageError:
                    self.last_lsn = self.durable_lsn
                    raise
                self.durable_lsn = self.last_lsn
            return self.durable_lsn

    def records(self, from_lsn: int) -> Iterator[Record]:
        """Read the records from this lsn up to the last one appended before the first is taken.

        Raises:
            CorruptLogError: one of them cannot be read, or is no longer kept.
        """
        with self._mutex:
            last, segments = self.last_lsn, list(self._segments)
        if from_lsn < segments[0]:
            raise CorruptLogError(
                f"{self.directory}: asked for the records from lsn {from_lsn} on, the oldest kept is {segments[0]}; a "
                f"log must reach back to its snapshot; restore the missing segments from a backup"
            )
        for first, beyond in zip(segments, [*segments[1:], last + 1], strict=True):
            if from_lsn < beyond:
                records = (record for record, _ in self._walk(first, beyond))
                yield from (record for record in records if record.lsn >= from_lsn)

    def rotate(self) -> None:
        """Sync, then begin a new segment so that `drop_before` can remove the older ones; raises `StorageError`."""
        with self._mutex, storage("begin a new segment in", self.directory):
            self._faults("rotate:before")
            self.sync()
            first = self.last_lsn + 1
            if first == self._segments[-1]:
                return
            try:
                opened = AppendFile(self._path(first), faults=self._faults)
            except StorageError:
                # An empty segment in the middle of a log that went on would look like lost records.
                self._path(first).unlink(missing_ok=True)
                raise
            self._active.close()
            self._active = opened
            self._segments.append(first)
            self._faults("rotate:after_create")

    def drop_before(self, lsn: int) -> None:
        """Remove the segments that hold only records before this lsn, never the one being written."""
        with self._mutex, storage("drop old segments of", self.directory):
            self._faults("drop:before")
            while len(self._segments) > 1 and self._segments[1] <= lsn:
                self._path(self._segments[0]).unlink()
                del self._segments[0]
            sync_directory(self.directory)

    def close(self, *, sync: bool = True) -> None:
        """Sync, let go of the files and of the lock; idempotent.

        Args:
            sync: False leaves the disk as a crash at this moment would.
        """
        with self._mutex:
            if self._lock_fd < 0:
                return
            try:
                if sync:
                    self.sync()
            finally:
                self._active.close()
                os.close(self._lock_fd)
                self._lock_fd = -1

    def _path(self, first_lsn: int) -> Path:
        return self.directory / f"{first_lsn:020d}.log"

    def _pieces(self, head: bytes, payload: memoryview) -> Iterator[Buffer]:
        self._faults("append:before")
        yield head
        self._faults("append:after_header")
        yield payload
        self._faults("append:after_payload")

    def _find_segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self.directory.glob("*.log") if path.stem.isdigit()) or [1]

    def _check_segments(self) -> tuple[int, int]:
        """Walk the whole log; returns its last lsn and where that record ends in the last segment."""
        last_lsn, end = self._segments[0] - 1, 0
        for first in self._segments:
            if first != last_lsn + 1:
                raise CorruptLogError(
                    f"{self._path(first)} begins at lsn {first}, expected {last_lsn + 1}; a log has no gaps; restore "
                    f"the missing segments from a backup"
                )
            end = 0
            for record, record_end in self._walk(first):
                last_lsn, end = record.lsn, record_end
                self._tell(f"its log is checked, record {last_lsn}")
        return last_lsn, end

    def _walk(self, first: int, beyond: int | None = None) -> Iterator[tuple[Record, int]]:
        """The records of one segment, each with the byte after it; up to `beyond`, or to its possibly torn end."""
        path = self._path(first)
        with storage("read", path), path.open("rb", buffering=0) as file:
            fd, size = file.fileno(), os.fstat(file.fileno()).st_size
            lsn, offset = first, 0
            while offset < size if beyond is None else lsn < beyond:
                placed = read_at(fd, offset, size)
                if placed is None or placed.record.lsn != lsn:
                    may_be_torn = beyond is None and first == self._segments[-1]
                    if may_be_torn and not was_durable(fd, offset, size, lsn):
                        return
                    raise _damaged(path, offset, lsn)
                yield placed.record, placed.end
                lsn, offset = lsn + 1, placed.end


def _damaged(path: Path, offset: int, lsn: int) -> CorruptLogError:
    return CorruptLogError(
        f"{path}: the record of lsn {lsn} at byte {offset} is damaged; it had been durable, and only the end of a log "
        f"may be torn; restore this file from a backup, or begin anew from the learners with `diloco syncer --reseed`"
    )


def _lock_directory(directory: Path) -> int:
    """Hold this directory against other processes; the system lets go of it when this one ends."""
    with storage("lock", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise StorageError(
                f"{directory} is in use by another syncer; a run directory serves one at a time; stop the other one or "
                f"choose another run directory"
            ) from error
        except OSError:
            os.close(fd)
            raise
        return fd
