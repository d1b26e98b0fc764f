"""The store of the learners' checkpoints, from which a restarted or new learner takes its optimizer state.

    <store>/<learner>/<unix ms>-<step>-<digest>.safetensors     the last NUM_KEPT checkpoints of each learner
    <store>/<learner>/parts/<rank>-<digest>.safetensors         the part of each rank, if a learner has several
    <store>/wanted                                              a marker that asks each learner for a checkpoint

1. A checkpoint is one file (`checkpoint_file.py`).
2. The file name holds the digest of the content. The writer sets the name last, so a named file is complete. Readers
   check the digest.
3. A store is a local folder or any URL that fsspec supports. A local file is durable before it gets its name.
4. A learner that sees a marker takes a checkpoint soon, and names the marker in this and all later checkpoints.
5. The next writer removes incomplete files of a killed process.
6. The checkpoint of several ranks only holds the digests of their parts. It is written after all parts, so a listed
   checkpoint is complete. Parts that no checkpoint names are removed.

Source: our choice.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_diloco.errors import StorageError
from lightning_diloco.storage import checkpoint_file
from lightning_diloco.storage.checkpoint_file import Checkpoint
from lightning_diloco.storage.files import make_directory, sync_directory
from lightning_diloco.storage.tree import UnstorableError

NUM_KEPT = 2
_NAME = re.compile(r"(\d{14})-(\d{9})-([0-9a-f]{32})\.safetensors")
_PART_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.safetensors")
_PARTS, _WANTED, _PARTIAL = "parts", "wanted", ".partial"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A checkpoint in the store; entries are ordered by time.

    Args:
        written_ms: unix time on the learner's clock, in milliseconds.
        step: optimizer step of the trainer.
        digest: digest of the file.
        learner: learner id.
    """

    written_ms: int
    step: int
    digest: str
    learner: str

    @property
    def name(self) -> str:
        return f"{self.written_ms:014d}-{self.step:09d}-{self.digest}.safetensors"


class CheckpointStore:
    """All checkpoints of one run.

    Args:
        url: a folder, or a URL of any file system that fsspec supports; created by the first write.

    Attributes:
        is_local: whether the store is a local folder.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = url_to_fs(url)
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def write(self, checkpoint: Checkpoint) -> Entry:
        """Write a checkpoint, and remove the learner's older checkpoints beyond NUM_KEPT.

        Args:
            checkpoint: checkpoint whose tensors are on the CPU and share no memory.

        Raises:
            StorageError: writing failed; earlier checkpoints are kept.
            UnstorableError: the state holds a value that is neither plain nor a tensor.
        """
        before = self.entries(checkpoint.learner)
        with self._telling("write a checkpoint to"), self._scratch(checkpoint.learner) as scratch:
            digest = checkpoint_file.write(scratch, checkpoint)
            now_ms = max(int(1000 * time.time()), before[0].written_ms + 1 if before else 0)
            entry = Entry(now_ms, checkpoint.step, digest, checkpoint.learner)
            self._publish(scratch, self._path(entry))
            for old in before[NUM_KEPT - 1 :]:
                self._fs.rm_file(self._path(old))
        return entry

    def read(self, entry: Entry) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            StorageError: the checkpoint is damaged or cannot be read.
        """
        return self._read(self._path(entry), entry.digest)

    def entries(self, learner: str) -> list[Entry]:
        """Return the checkpoints of a learner, the newest first. Raises `StorageError`."""
        matches = [match for name in self._names(learner) if (match := _NAME.fullmatch(name))]
        return sorted((Entry(int(m[1]), int(m[2]), m[3], learner) for m in matches), reverse=True)

    def write_part(self, rank: int, part: Checkpoint) -> str:
        """Write the part of a rank; return its digest for the checkpoint that names it. Raises like `write`."""
        with self._telling("write a checkpoint to"), self._scratch(part.learner, _PARTS, str(rank)) as scratch:
            digest = checkpoint_file.write(scratch, part)
            self._publish(scratch, self._part_path(part.learner, rank, digest))
        return digest

    def read_part(self, learner: str, rank: int, digest: str) -> Checkpoint:
        """Read the part of a rank. Raises `StorageError`."""
        return self._read(self._part_path(learner, rank, digest), digest)

    def parts_named(self, learner: str) -> set[str]:
        """Return the digests of all parts that checkpoints of this learner name. Raises `StorageError`."""
        return {digest for entry in self.entries(learner) for digest in self.read(entry).parts}

    def remove_parts(self, learner: str, ranks: tuple[int, int], named: set[str]) -> None:
        """Remove parts that are not named.

        Args:
            learner: learner id.
            ranks: (r, n) removes parts of the ranks r, r + n, r + 2n, ..., so that n ranks together handle all parts.
            named: digests of the parts to keep.

        Raises:
            StorageError: the store failed.
        """
        rank, size = ranks
        found = [match for name in self._names(learner, _PARTS) if (match := _PART_NAME.fullmatch(name))]
        with self._telling("remove old checkpoints from"):
            for match in found:
                if int(match[1]) % size == rank and match[2] not in named:
                    self._fs.rm_file(self._part_path(learner, int(match[1]), match[2]))

    def copy(self, source: CheckpointStore, entry: Entry) -> None:
        """Copy a checkpoint with all its parts from another store. Raises `StorageError`."""
        whole = source.read(entry)
        parts = [source.read_part(entry.learner, rank, digest) for rank, digest in enumerate(whole.parts)]
        self.write(replace(whole, parts=tuple(self.write_part(rank, part) for rank, part in enumerate(parts))))

    def learners(self) -> list[str]:
        """Return the ids of learners with a folder here, sorted. Raises `StorageError`."""
        return sorted(name for name in self._names() if name != _WANTED)

    def ask(self, marker: str | None) -> None:
        """Ask each learner for a checkpoint that names this marker; None removes the marker."""
        with self._telling("leave a marker in"):
            if marker is None:
                self._fs.rm_file(f"{self._root}/{_WANTED}")
            else:
                self._fs.makedirs(self._root, exist_ok=True)
                self._fs.pipe_file(f"{self._root}/{_WANTED}", marker.encode())

    def asked(self) -> str | None:
        """Return the marker; None if there is no marker."""
        with self._telling("look for a marker in"):
            try:
                found: bytes = self._fs.cat_file(f"{self._root}/{_WANTED}")
            except FileNotFoundError:
                return None
            return found.decode() or None

    def _names(self, *below: str) -> list[str]:
        with self._telling("list the checkpoints in"):
            try:
                found: list[str] = self._fs.ls("/".join((self._root, *below)), detail=False, refresh=True)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in found]

    def _path(self, entry: Entry) -> str:
        return f"{self._root}/{entry.learner}/{entry.name}"

    def _part_path(self, learner: str, rank: int, digest: str) -> str:
        return f"{self._root}/{learner}/{_PARTS}/{rank}-{digest}.safetensors"

    def _read(self, path: str, digest: str) -> Checkpoint:
        with self._telling("read a checkpoint of"), self._local_copy(path) as copy:
            return checkpoint_file.read(copy, digest, name=path)

    @contextlib.contextmanager
    def _scratch(self, learner: str, *of_rank: str) -> Iterator[Path]:
        """Yield a temporary local file. For a local store it is in the final folder, so that it can be renamed.

        Args:
            learner: learner id.
            of_rank: (_PARTS, rank) for a part; other ranks write to the same folder at the same time.
        """
        below = (learner, *of_rank[:1])
        if self.is_local:
            folder, prefix = Path(self._root, *below), "".join(f"{rank}-" for rank in of_rank[1:])
            make_directory(folder)
        else:
            place = hashlib.sha256("/".join((self.url, learner, *of_rank)).encode()).hexdigest()[:16]
            folder, prefix = Path(tempfile.gettempdir()), f"diloco-{place}-"
        for left_behind in folder.glob(f"{glob.escape(prefix)}*{_PARTIAL}"):
            with contextlib.suppress(OSError):  # another user's file in a shared folder
                left_behind.unlink()
        number, name = tempfile.mkstemp(_PARTIAL, prefix, folder)
        os.close(number)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def _publish(self, scratch: Path, target: str) -> None:
        if not self.is_local:
            self._fs.put_file(str(scratch), target)
            return
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.rename(target)
        sync_directory(Path(target).parent)

    @contextlib.contextmanager
    def _local_copy(self, path: str) -> Iterator[Path]:
        if self.is_local:
            yield Path(path)
            return
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "checkpoint"
            self._fs.get_file(path, str(copy))
            yield copy

    @contextlib.contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        """Convert errors of the file system to `StorageError`."""
        try:
            yield
        except (StorageError, UnstorableError):
            raise
        except Exception as error:
            raise StorageError(
                f"could not {doing} {self.url}: {type(error).__name__}: {error}; it must be a folder or URL that can "
                "be read and written; check it, or name another with checkpoint_store="
            ) from error
