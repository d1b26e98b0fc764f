"""The redo log: the syncer's decisions, written to disk before they are announced.

1. Records have consecutive log sequence numbers (lsn), starting at 1. `append` writes a record. `sync` makes it
   durable.
2. Checksums cover all bytes of a record. The log ends before the first incomplete or damaged record.
3. Each record holds the last durable lsn at the time of writing. If a later record shows that a damaged record was
   durable, the log is corrupt, and the restart stops. Otherwise the damage is the torn end left by a crash. The restart
   cuts it off and reports it.
4. The name of a segment is its first lsn. The next segment is created after this segment is durable, so damage in any
   segment but the last is corruption. If all other segments were dropped, the name of an empty last segment still gives
   the next lsn.
5. A failed append leaves the log unchanged. A failed sync removes the records since the last successful sync. Both can
   be tried again.
6. Only one process at a time uses a log. It locks the directory until `close` or the end of the process. `log_records`
   reads a log that no process uses, and changes nothing.

Source: our choice, after write-ahead logs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning_diloco.errors import CorruptLogError, InUseError, StorageError
from lightning_diloco.storage.files import (
    AppendFile,
    Buffer,
    Faults,
    lock_directory,
    make_directory,
    no_faults,
    storage,
    sync_directory,
)
from lightning_diloco.storage.log_frames import Placed, Record, encode, extent_at, read_at, was_durable

__all__ = ["Record", "RedoLog", "held", "log_records"]


class RedoLog:
    """An append-only log of JSON headers with raw payloads; safe to use from several threads.

    Opening reads and checks the whole log, and cuts off a torn end.

    Args:
        directory: directory of the log; created if it does not exist.
        faults: called at "append:before", "append:after_header", "append:after_payload", "sync:before", "sync:after",
            "rotate:before", "rotate:after_create" and "drop:before", for tests that fail or crash there.
        locked: called when this process has locked the directory, before the log is read.
        tell: called with a description of the progress of opening.

    Attributes:
        torn_bytes: bytes that were cut off at opening.
        last_lsn: lsn of the last appended record; 0 if no record was ever appended.
        durable_lsn: lsn of the last record known to be on disk.

    Raises:
        CorruptLogError: a durable record is damaged.
        InUseError: another process uses it.
        StorageError: the directory cannot be used.
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
            self._lock_fd = _locked(self.directory)
            undo.callback(os.close, self._lock_fd)
            locked()
            self._segments = [int(path.stem) for path in _segments_in(self.directory)] or [1]
            self._active = AppendFile(self._path(self._segments[-1]), faults=faults)
            undo.callback(self._active.close)
            self.last_lsn, end = self._check_segments()
            self.torn_bytes = self._active.end - end
            # Needed even without a torn end: records that a killed process left in the page cache become durable.
            self._active.cut(end)
            undo.pop_all()
        self.durable_lsn = self.last_lsn

    @property
    def first_lsn(self) -> int:
        """The oldest lsn that is kept; `last_lsn + 1` if there are no records."""
        return self._segments[0]

    @property
    def nbytes(self) -> int:
        """Size of all segments, in bytes."""
        with self._mutex:
            return sum(self._path(first).stat().st_size for first in self._segments[:-1]) + self._active.end

    def append(self, header: Mapping[str, object], payload: Buffer = b"") -> int:
        """Write one record, which is durable after the next `sync`.

        Args:
            header: a JSON object with finite numbers.
            payload: contiguous bytes of any kind.

        Returns:
            The record's lsn.

        Raises:
            StorageError: writing failed; the log is unchanged.
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
            StorageError: the disk failed; all records since the last good sync are removed.
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

    def copy(self, copied: Sequence[Record]) -> None:
        """Make the next records of another log durable.

        Args:
            copied: the records after the last one, in order.

        Raises:
            StorageError: the disk failed; the log is unchanged.
            CorruptLogError: a record does not follow the last one.
        """
        before = self.last_lsn
        for lsn, record in enumerate(copied, start=before + 1):
            if record.lsn != lsn:
                raise CorruptLogError(f"log record {record.lsn} came after {lsn - 1}; it must be the next")
        try:
            for record in copied:
                self.append(record.header, record.payload)
            self.sync()
        except StorageError:
            self.cut_after(before)
            raise

    def records(self, from_lsn: int) -> Iterator[Record]:
        """Yield the records from this lsn up to the last one at the time of the first read.

        Raises:
            CorruptLogError: a record is damaged or no longer kept.
        """
        with self._mutex:
            last, segments = self.last_lsn, list(self._segments)
        if from_lsn < segments[0]:
            raise _too_old(self.directory, from_lsn, segments[0])
        for first, beyond in zip(segments, [*segments[1:], last + 1], strict=True):
            if from_lsn < beyond:
                yield from (placed.record for placed in _walk(self._path(first), from_lsn, beyond))

    def open_segment(self, lsn: int) -> tuple[int, int]:
        """Open the segment that has this record, or will have it; return its first lsn and a descriptor.

        Raises:
            CorruptLogError: the record is no longer kept.
        """
        with self._mutex, storage("read", self.directory):
            found = [first for first in self._segments if first <= lsn]
            if not found:
                raise _too_old(self.directory, lsn, self._segments[0])
            return found[-1], os.open(self._path(found[-1]), os.O_RDONLY | os.O_CLOEXEC)

    def rotate(self) -> None:
        """Sync, then start a new segment, so that `drop_before` can remove older segments. Raises `StorageError`."""
        with self._mutex, storage("begin a new segment in", self.directory):
            self._faults("rotate:before")
            self.sync()
            self._active.sync()  # also without new records, because it cuts off leftovers of a failed append
            first = self.last_lsn + 1
            if first == self._segments[-1]:
                return
            try:
                opened = AppendFile(self._path(first), faults=self._faults)
            except StorageError:
                # The log continues in the old segment. An empty segment after it would look like lost records.
                self._path(first).unlink(missing_ok=True)
                raise
            self._active.close()
            self._active = opened
            self._segments.append(first)
            self._faults("rotate:after_create")

    def drop_before(self, lsn: int) -> None:
        """Remove segments that hold only records before this lsn, but never the segment being written."""
        with self._mutex, storage("drop old segments of", self.directory):
            self._faults("drop:before")
            while len(self._segments) > 1 and self._segments[1] <= lsn:
                self._path(self._segments[0]).unlink()
                del self._segments[0]
            sync_directory(self.directory)

    def cut_after(self, lsn: int) -> None:
        """Remove all records after this one, durably; call this again after a crash.

        Raises:
            CorruptLogError: this record is not in the log.
        """
        with self._mutex, storage("cut", self.directory):
            if not self.first_lsn - 1 <= lsn <= self.last_lsn:
                raise _too_old(self.directory, lsn, self._segments[0])
            while len(self._segments) > 1 and self._segments[-1] > lsn:  # from the end, so that there is never a gap
                self._active.close()
                self._path(self._segments.pop()).unlink()
                sync_directory(self.directory)
                self._active = AppendFile(self._path(self._segments[-1]), faults=self._faults)
            last = list(_walk(self._active.path, lsn, lsn + 1))
            self._active.cut(last[0].end if last else 0)
            self.last_lsn = self.durable_lsn = lsn

    def close(self) -> None:
        """Sync, then close the files and release the lock; idempotent."""
        with self._mutex:
            if self._lock_fd < 0:
                return
            try:
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

    def _check_segments(self) -> tuple[int, int]:
        """Read the whole log; return its last lsn and the end offset of that record in the last segment."""
        last_lsn, end = self._segments[0] - 1, 0
        for placed in _walk_all([self._path(first) for first in self._segments]):
            last_lsn, end = placed.record.lsn, placed.end
            self._tell(f"checking the log, record {last_lsn}")
        return last_lsn, end if last_lsn >= self._segments[-1] else 0


def log_records(directory: Path, needed_lsn: int) -> Iterator[Record]:
    """Yield all records of a log that no syncer uses; see `held`. A torn end is left out, but not cut off.

    Raises:
        CorruptLogError: a durable record is damaged, or the log begins after needed_lsn.
    """
    segments = _segments_in(directory)
    if segments and (oldest := int(segments[0].stem)) > needed_lsn:
        raise _too_old(directory, needed_lsn, oldest)
    yield from (placed.record for placed in _walk_all(segments))


@contextlib.contextmanager
def held(directory: Path, *, shared: bool = True) -> Iterator[None]:
    """Lock a log against syncers during the block, and unless `shared`, against other readers.

    Raises:
        InUseError: another process uses it.
    """
    if not directory.is_dir():
        raise StorageError(f"{directory} does not exist; a run directory must have it; give RUN_DIR")
    fd = _locked(directory, shared=shared)
    try:
        yield
    finally:
        os.close(fd)


def _segments_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.log") if path.stem.isdigit())


def _walk_all(paths: Sequence[Path]) -> Iterator[Placed]:
    """Yield the records of successive segments, up to a torn end."""
    lsn = int(paths[0].stem) if paths else 0
    for path in paths:
        if int(path.stem) != lsn:
            raise CorruptLogError(
                f"{path} begins at lsn {int(path.stem)}, expected {lsn}; a log must have no gaps; restore the missing "
                f"segments from a backup"
            )
        for placed in _walk(path, may_be_torn=path == paths[-1]):
            lsn = placed.record.lsn + 1
            yield placed


def _walk(path: Path, from_lsn: int = 0, beyond: int | None = None, *, may_be_torn: bool = False) -> Iterator[Placed]:
    """Yield the records of a segment, from `from_lsn` up to `beyond`; without it, up to the end, which may be torn."""
    with storage("read", path), path.open("rb", buffering=0) as file:
        fd, size = file.fileno(), os.fstat(file.fileno()).st_size
        lsn, offset = int(path.stem), 0
        while lsn < from_lsn and (skipped := extent_at(fd, offset)) is not None:  # opening has checked their content
            lsn, offset = lsn + 1, skipped[1]
        while offset < size if beyond is None else lsn < beyond:
            placed = read_at(fd, offset, size)
            if placed is None or placed.record.lsn != lsn:
                if may_be_torn and not was_durable(fd, offset, size, lsn):
                    return
                raise _damaged(path, offset, lsn)
            yield placed
            lsn, offset = lsn + 1, placed.end


def _too_old(directory: Path, lsn: int, oldest: int) -> CorruptLogError:
    return CorruptLogError(
        f"{directory}: asked for the records from lsn {lsn} on, the oldest kept is {oldest}; the log must reach back "
        f"to its snapshot; restore the missing segments from a backup"
    )


def _damaged(path: Path, offset: int, lsn: int) -> CorruptLogError:
    return CorruptLogError(
        f"{path}: the record of lsn {lsn} at byte {offset} is damaged; it was durable, and only the end of a log may "
        f"be torn; restore this file from a backup, or start again from the learners with `diloco syncer --reseed`"
    )


def _locked(directory: Path, *, shared: bool = False) -> int:
    with storage("lock", directory):
        fd = lock_directory(directory, shared=shared)
    if fd is None:
        raise InUseError(
            f"{directory} is in use by a syncer, or a command reads it; stop it, wait for its end, or choose another "
            "run directory"
        )
    return fd
