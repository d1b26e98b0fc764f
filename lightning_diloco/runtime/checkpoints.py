"""The checkpoints of a run's learners: where a process that died finds its optimizer again, and a new one a peer's.

    <store>/<learner>/<unix ms>-<step>-<digest>.safetensors     the last NUM_KEPT of each learner
    <store>/wanted                                              a marker: each learner is asked for one

1. A checkpoint is one safetensors file: tensors, and the plain rest as JSON in its header (`tree.py`). Nothing is
   pickled.
2. Its name holds the digest of its bytes and is given last, so what has the name is whole; a reader checks it anyhow.
3. A store is a local folder or any URL that fsspec knows. A local file is durable before it has its name.
4. A learner that sees a marker takes a checkpoint soon, and names the marker in it and in all later ones.

Source: our choice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_diloco.errors import StorageError
from lightning_diloco.runtime.files import make_directory, sync_directory
from lightning_diloco.runtime.tree import Packed, Tree, pack, unpack

NUM_KEPT = 2
FORMAT = 1
_NAME = re.compile(r"(\d{14})-(\d{9})-([0-9a-f]{32})\.safetensors")
_WANTED = "wanted"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a learner needs besides the anchors to go on.

    Args:
        run, learner, incarnation: whose it is.
        process: a nonce of the process that wrote it.
        step: optimizer steps of the trainer so far.
        state: tensors and plain values.
        marker: the last marker that was seen before it was taken.
    """

    run: str
    learner: str
    incarnation: int
    process: str
    step: int
    state: Tree
    marker: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A checkpoint that is there, unread; they order by time.

    Args:
        written_ms: unix time by the clock of its learner.
        step: of the trainer.
        digest: of its bytes.
        learner: whose it is.
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
        url: a folder, or a URL of any file system that fsspec knows; made when it is first written to.

    Attributes:
        is_local: whether it is a folder here.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = url_to_fs(url)
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def write(self, checkpoint: Checkpoint) -> Entry:
        """Keep this one, and remove the learner's oldest.

        Args:
            checkpoint: with CPU tensors that share no memory.

        Raises:
            StorageError: the store did not take it; what it had is still there.
            UnstorableError: the state holds something that is neither plain nor a tensor.
        """
        tensors: dict[str, Tensor] = {}
        about = {"format": FORMAT, "run": checkpoint.run, "learner": checkpoint.learner, "step": checkpoint.step}
        about |= {"incarnation": checkpoint.incarnation, "process": checkpoint.process, "marker": checkpoint.marker}
        header = json.dumps({**about, "state": pack(checkpoint.state, tensors)})
        before = self.entries(checkpoint.learner)
        with self._telling("write a checkpoint to"), self._scratch(checkpoint.learner) as scratch:
            save_file(tensors, scratch, metadata={"diloco": header})
            now_ms = max(int(1000 * time.time()), before[0].written_ms + 1 if before else 0)
            entry = Entry(now_ms, checkpoint.step, _digest(scratch), checkpoint.learner)
            self._publish(scratch, self._path(entry))
            for old in before[NUM_KEPT - 1 :]:
                self._fs.rm_file(self._path(old))
        return entry

    def read(self, entry: Entry) -> Checkpoint:
        """Read one back.

        Raises:
            StorageError: it is damaged, or cannot be read.
        """
        with self._telling("read a checkpoint of"), self._local_copy(self._path(entry)) as path:
            if (found := _digest(path)) != entry.digest:
                raise _damaged(self._path(entry), f"has the digest {found}")
            try:
                with safe_open(path, framework="pt") as file:
                    about = json.loads((file.metadata() or {})["diloco"])
                    # Copies: an optimizer that goes on from them must not hang on a file that is removed some day.
                    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                return _checkpoint(about, tensors)
            except (SafetensorError, KeyError, TypeError, ValueError) as error:
                raise _damaged(self._path(entry), f"is not one ({type(error).__name__}: {error})") from error

    def entries(self, learner: str) -> list[Entry]:
        """The checkpoints of a learner, the newest first; raises `StorageError`."""
        matches = [match for name in self._names(learner) if (match := _NAME.fullmatch(name))]
        return sorted((Entry(int(m[1]), int(m[2]), m[3], learner) for m in matches), reverse=True)

    def learners(self) -> list[str]:
        """Who has a folder here, in order; raises `StorageError`."""
        return sorted(name for name in self._names() if name != _WANTED)

    def ask(self, marker: str | None) -> None:
        """Ask every learner for a checkpoint that names this marker; None: nobody is asked any more."""
        with self._telling("leave a marker in"):
            if marker is None:
                self._fs.rm_file(f"{self._root}/{_WANTED}")
            else:
                self._fs.makedirs(self._root, exist_ok=True)
                self._fs.pipe_file(f"{self._root}/{_WANTED}", marker.encode())

    def asked(self) -> str | None:
        """The marker, if there is one."""
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

    @contextlib.contextmanager
    def _scratch(self, learner: str) -> Iterator[Path]:
        """A local file to fill; for a local store beside its final place, so that it can be renamed."""
        folder = Path(self._root) / learner if self.is_local else None
        if folder is not None:
            make_directory(folder)
        number, name = tempfile.mkstemp(".partial", dir=folder)
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
        """Whatever a file system raises leaves as one kind of error."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"could not {doing} {self.url}: {type(error).__name__}: {error}; it must be a folder or URL that can "
                "be read and written; check it, or name another with checkpoint_store="
            ) from error


def _checkpoint(about: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, this version reads {FORMAT}")
    state: Packed = about["state"]
    return Checkpoint(
        run=about["run"],
        learner=about["learner"],
        incarnation=about["incarnation"],
        process=about["process"],
        step=about["step"],
        state=unpack(state, tensors),
        marker=about["marker"],
    )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _damaged(path: str, found: str) -> StorageError:
    return StorageError(
        f"the checkpoint {path} {found}; a whole one has the digest of its name; it is passed over, and may be removed"
    )
