"""Files that hold what they were given, or say that they do not.

1. What is *durable* has been fsynced, and so has the directory that names it.
2. `AppendFile.append` and `write_whole` succeed as a whole or change nothing a later reader would believe.
3. Every `OSError` leaves as a `StorageError` that names the path, what the system said and what to do.
4. Only the owner may read: files are created 0600, directories 0700. No link is followed to write.

Source: our choice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lightning_diloco.errors import StorageError

Buffer = bytes | bytearray | memoryview
Faults = Callable[[str], None]


def no_faults(point: str) -> None:
    """The default hook: nothing happens at any of the named points."""


class AppendFile:
    """A file that only grows, one whole append at a time.

    Bytes beyond `end` are leftovers of an append that failed or was interrupted; they are cut before the next one. A
    failed `sync` takes back everything since the last good one, because after it nobody can say which of it is on disk.

    Args:
        path: created, with mode 0600, if it is not there; its present content counts as durable.
        faults: called at "sync:before" and "sync:after"; an `OSError` from it is one of the disk.

    Attributes:
        end: bytes appended so far.
        durable_end: bytes known to be on disk.
    """

    def __init__(self, path: Path, *, faults: Faults = no_faults) -> None:
        self.path = path
        self._faults = faults
        self._has_leftovers = False
        with storage("open", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Even if it was there: its creator may have died before the name was durable.
                sync_directory(path.parent)
                self.end = self.durable_end = os.fstat(self._fd).st_size
            except OSError:
                self.close()
                raise

    @property
    def is_open(self) -> bool:
        """False once closed."""
        return self._fd >= 0

    def append(self, pieces: Iterable[Buffer]) -> None:
        """Write all pieces at the end, or none; raises `StorageError`."""
        with storage("append to", self.path):
            self._cut_leftovers()
            self._has_leftovers = True
            try:
                offset = self.end
                for piece in pieces:
                    offset = _write_at(self._fd, offset, piece)
            except OSError:
                with contextlib.suppress(OSError):
                    self._cut_leftovers()
                raise
            self.end, self._has_leftovers = offset, False

    def sync(self) -> None:
        """Make everything appended durable, or take it back; raises `StorageError`."""
        with storage("fsync", self.path):
            self._cut_leftovers()
            try:
                self._faults("sync:before")
                os.fsync(self._fd)
                self._faults("sync:after")
            except OSError:
                self.end, self._has_leftovers = self.durable_end, True
                with contextlib.suppress(OSError):
                    self._cut_leftovers()
                raise
            self.durable_end = self.end

    def cut(self, end: int) -> None:
        """Shorten the file to `end` bytes, durably; raises `StorageError`."""
        with storage("truncate", self.path):
            self.end = self.durable_end = end
            self._has_leftovers = True
            self._cut_leftovers()
            os.fsync(self._fd)

    def close(self) -> None:
        """Let go of the file without syncing it; idempotent."""
        if self.is_open:
            os.close(self._fd)
            self._fd = -1

    def _cut_leftovers(self) -> None:
        if self._has_leftovers:
            os.ftruncate(self._fd, self.end)
            self._has_leftovers = False


@contextlib.contextmanager
def storage(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StorageError` with its errno, the path and what to do about it."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the disk and its mount, then try again")
        raise StorageError(
            error.errno,
            f"could not {doing} {path}: {error.strerror or error}; what was durable before still is; {advice}",
        ) from error


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, mode 0700, each one durable in its parent."""
    with storage("create", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_directory(folder.parent)


def write_file(path: Path, *pieces: Buffer) -> None:
    """Create a file with this content, piece by piece, and fsync it; its name becomes durable with `sync_directory`.

    What lies there already, a link that somebody planted perhaps, is an error.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        offset = 0
        for piece in pieces:
            offset = _write_at(fd, offset, piece)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: Buffer) -> None:
    """Replace a small file atomically and durably: readers see the old content or the new one."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with storage("write", path):
        try:
            write_file(partial, data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory with all it holds, durably; nothing happens if it is not there."""
    with storage("remove", path), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
        sync_directory(path.parent)


_ADVICE = {
    errno.ENOSPC: "free some space on this file system; it goes on by itself once there is room",
    errno.EDQUOT: "free some space within your quota; it goes on by itself once there is room",
    errno.EROFS: "remount the file system for writing, or choose another run directory",
    errno.EACCES: "give this user the right to write there, or choose another run directory",
}


def _write_at(fd: int, offset: int, data: Buffer) -> int:
    # One write may take less than it was given: Linux stops at 2 GiB, and a full disk stops anywhere.
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(fd, rest, offset)
        offset += written
        rest = rest[written:]
    return offset
