"""Durable and atomic writes to files.

1. *Durable* means that the file and its directory have been fsynced.
2. `AppendFile.append` and `write_whole` either succeed completely or change nothing that a reader uses.
3. An `OSError` becomes a `StorageError` with the path, the system's message and advice.
4. Files are readable only by their owner: mode 0600, directories 0700. Writing never follows links.

Source: our choice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lightning_diloco.errors import StorageError

Buffer = bytes | bytearray | memoryview
Faults = Callable[[str], None]


def no_faults(point: str) -> None:
    """Do nothing; the default hook."""


class AppendFile:
    """An append-only file.

    Bytes beyond `end` are leftovers of a failed or interrupted append. The next append cuts them off. A failed `sync`
    removes all bytes since the last successful `sync`, because it is unknown which of them are on disk.

    Args:
        path: path of the file; created with mode 0600 if it does not exist. Existing content counts as durable.
        faults: called at "sync:before" and "sync:after"; an `OSError` from it is treated as an error of the disk.

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
                # Also for an existing file: its creator may have died before the name was durable.
                sync_directory(path.parent)
                self.end = self.durable_end = os.fstat(self._fd).st_size
            except OSError:
                self.close()
                raise

    @property
    def is_open(self) -> bool:
        """Whether the file has not been closed."""
        return self._fd >= 0

    def append(self, pieces: Iterable[Buffer]) -> None:
        """Write all pieces at the end, or none. Raises `StorageError`."""
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
        """Make all appended bytes durable. If this raises `StorageError`, bytes since the last sync are removed."""
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
        """Shorten the file to `end` bytes, durably. Raises `StorageError`."""
        with storage("truncate", self.path):
            self.end = self.durable_end = end
            self._has_leftovers = True
            self._cut_leftovers()
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file without syncing it; idempotent."""
        if self.is_open:
            os.close(self._fd)
            self._fd = -1

    def _cut_leftovers(self) -> None:
        if self._has_leftovers:
            os.ftruncate(self._fd, self.end)
            self._has_leftovers = False


@contextlib.contextmanager
def storage(doing: str, path: Path) -> Iterator[None]:
    """Convert an `OSError` of the block to a `StorageError` with errno, path and advice."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the disk and its mount, then try again")
        raise StorageError(
            error.errno,
            f"could not {doing} {path}: {error.strerror or error}; earlier durable data is unchanged; {advice}",
        ) from error


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_directory(path: Path, *, shared: bool = False) -> int | None:
    """Lock a directory until the descriptor that this returns is closed, or this process ends.

    Returns:
        A descriptor; None if another one holds the lock.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, mode 0700, each one durable in its parent."""
    with storage("create", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_directory(folder.parent)


def write_file(path: Path, *pieces: Buffer) -> None:
    """Create a file from pieces and fsync it; `sync_directory` then makes its name durable.

    An existing file or link at this path is an error.
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
    """Replace a small file atomically and durably. Readers see the old content or the new content."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with storage("write", path):
        try:
            write_file(partial, data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(path.parent)


def whole_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from byte `start` on, without an incomplete last line, which may still be written."""
    with path.open("rb") as file:
        file.seek(start)
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), file)


def remove_tree(path: Path) -> None:
    """Remove a directory with its content, durably; does nothing if it does not exist."""
    with storage("remove", path), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
        sync_directory(path.parent)


_ADVICE = {
    errno.ENOSPC: "free some space on this file system; writing then continues by itself",
    errno.EDQUOT: "free some space within your quota; writing then continues by itself",
    errno.EROFS: "remount the file system for writing, or choose another run directory",
    errno.EACCES: "give this user the right to write there, or choose another run directory",
}


def _write_at(fd: int, offset: int, data: Buffer) -> int:
    # One call may write less than requested: Linux stops at 2 GiB, and a full disk stops anywhere.
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(fd, rest, offset)
        offset += written
        rest = rest[written:]
    return offset
