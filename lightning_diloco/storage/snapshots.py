"""Snapshots: the syncer's whole durable state at one log sequence number.

    <directory>/<lsn>/state.json                  the state machine's state, JSON
    <directory>/<lsn>/tensors-<stem>.safetensors  the tensors, one file per stem (a fragment)
    <directory>/<lsn>/B2SUMS                      checksums of the other files, for `b2sum -c B2SUMS`

1. A snapshot is written under a temporary name, fsynced file by file, then renamed. A named snapshot is therefore
   complete.
2. The old snapshot is removed after the new one is durable, unless a replay starts from it. Incomplete snapshots left
   by a crash are removed when a snapshot is opened.
3. A file is verified before its content is used. Nothing is pickled.
4. Tensors are written and read file by file, so that only one fragment at a time is in memory.
5. A snapshot is due when the log has grown as large as the state, so log and snapshot stay under three times that size.
   The log before a snapshot is dropped when the snapshot is durable.

Source: our choice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage import tensor_file
from lightning_diloco.storage.files import (
    Buffer,
    Faults,
    make_directory,
    no_faults,
    remove_tree,
    storage,
    sync_directory,
    write_file,
)
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)

MIN_LOG_BYTES = 8 << 20
AGAIN_S = 30.0
_PARTIAL = ".partial"
_STATE, _SUMS = "state.json", "B2SUMS"

Tensors = Iterable[tuple[str, Mapping[str, Tensor]]]


class SnapshotStore:
    """The directory of snapshots of a syncer or a shard. Only one thread at a time may write, or begin to.

    Args:
        directory: directory of the snapshots; created by the first `write`.
        faults: called at "snapshot:before", "snapshot:after_file", "snapshot:before_rename", "snapshot:after_rename"
            and "snapshot:after_remove", for tests that fail or crash there.
    """

    def __init__(self, directory: str | os.PathLike[str], *, faults: Faults = no_faults) -> None:
        self.directory = Path(directory)
        self._faults = faults
        self._writing: threading.Thread | None = None
        self._again_s = 0.0

    def write(self, lsn: int, state: Mapping[str, object], tensors: Tensors, *, keeps_oldest: bool = False) -> None:
        """Write a snapshot, unless this lsn already has one, then remove older snapshots.

        Args:
            lsn: last log record in the state; not lower than that of an existing snapshot.
            state: a JSON object with finite numbers.
            tensors: (stem, tensors by name), consumed one by one; CPU tensors that share no memory.
            keeps_oldest: also keep the oldest snapshot, for a replay.

        Raises:
            StorageError: writing failed; the previous snapshot is kept.
        """
        make_directory(self.directory)
        lsns = self.lsns()
        assert not lsns or lsns[-1] <= lsn, f"a snapshot of lsn {lsns[-1]} is there, {lsn} was to be written"
        older = [each for each in lsns if each < lsn]
        final = self.path(lsn)
        partial = final.with_name(final.name + _PARTIAL)
        remove_tree(partial)
        with storage("write the snapshot", final):
            if lsn not in lsns:
                self._faults("snapshot:before")
                partial.mkdir(mode=0o700)
                self._fill(partial, state, tensors)
                self._faults("snapshot:before_rename")
                partial.rename(final)
                sync_directory(self.directory)
                self._faults("snapshot:after_rename")
            for old in older[keeps_oldest:]:
                removed = self.path(old).with_suffix(_PARTIAL)  # a crash must not leave half of it under its name
                self.path(old).rename(removed)
                remove_tree(removed)
            self._faults("snapshot:after_remove")

    def is_due(self, redo_log: RedoLog, state_bytes: int) -> bool:
        """Return whether the log has grown as large as the state, unless one is being written, or failed recently."""
        if time.monotonic() < self._again_s or (self._writing is not None and self._writing.is_alive()):
            return False
        return redo_log.nbytes > max(MIN_LOG_BYTES, state_bytes)

    def begin(
        self,
        redo_log: RedoLog,
        state: Mapping[str, object],
        tensors: Tensors,
        *,
        before: Callable[[], object] = lambda: None,
        before_drop: Callable[[int], object] = lambda lsn: None,
    ) -> None:
        """Write a snapshot in the background, while the log continues; then drop the log before it.

        If writing fails, the log keeps growing, and a snapshot is due again after AGAIN_S.

        Args:
            redo_log: the log; the state is that after its last record.
            state, tensors: see `write`.
            before: called first; may raise `StorageError`.
            before_drop: called with the lsn up to which the log is dropped, when the snapshot is written.
        """
        try:
            before()
            redo_log.rotate()
        except StorageError as error:
            self._failed(error)
            return
        lsn = redo_log.last_lsn

        def run() -> None:
            try:
                self.write(lsn, state, tensors)
                before_drop(lsn)
                redo_log.drop_before(lsn + 1)
            except Exception as error:
                self._failed(error)

        self._writing = threading.Thread(target=run, name="diloco-snapshot", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait for a snapshot that is being written."""
        if self._writing is not None:
            self._writing.join()

    def _failed(self, error: Exception) -> None:
        self._again_s = time.monotonic() + AGAIN_S
        log.error("the snapshot was not completed, the log keeps growing: %s", error)

    def oldest(self) -> Snapshot | None:
        """Open the oldest snapshot; see `latest`."""
        return self._open(0)

    def latest(self) -> Snapshot | None:
        """Open the newest snapshot, and remove incomplete snapshots.

        Returns:
            The snapshot; None if there is none. Its state is verified, its tensors are verified when they are read.

        Raises:
            CorruptLogError: the snapshot is damaged.
        """
        return self._open(-1)

    def _open(self, which: int) -> Snapshot | None:
        for partial in self.directory.glob("*" + _PARTIAL):
            remove_tree(partial)
        lsns = self.lsns()
        if not lsns:
            return None
        path = self.path(lsns[which])
        sums = _read_sums(path)
        state = json.loads(_read_verified(path / _STATE, sums))
        return Snapshot(lsn=lsns[which], state=state, tensors=_TensorFiles(path, sums))

    def path(self, lsn: int) -> Path:
        """Return the directory of a snapshot."""
        return self.directory / f"{lsn:020d}"

    def lsns(self) -> list[int]:
        """Return the lsns of all complete snapshots, in order."""
        return sorted(int(path.name) for path in self.directory.glob("[0-9]*") if path.name.isdigit())

    def _fill(self, folder: Path, state: Mapping[str, object], tensors: Tensors) -> None:
        sums: dict[str, str] = {}

        def put(name: str, *pieces: Buffer) -> None:
            assert name not in sums, f"two files of a snapshot are called {name}"
            write_file(folder / name, *pieces)
            sums[name] = _checksum(*pieces)
            self._faults("snapshot:after_file")

        for stem, by_name in tensors:
            put(_tensor_file(stem), *tensor_file.pieces(by_name))
        put(_STATE, json.dumps(state, allow_nan=False).encode())
        write_file(folder / _SUMS, "".join(f"{sums[name]}  {name}\n" for name in sums).encode())
        sync_directory(folder)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A durable state.

    Args:
        lsn: last log record in the state.
        state: JSON object given to `SnapshotStore.write`.
        tensors: stem -> tensors by name; each access reads and verifies one file.
    """

    lsn: int
    state: Json
    tensors: Mapping[str, dict[str, Tensor]]


class _TensorFiles(Mapping[str, dict[str, Tensor]]):
    def __init__(self, folder: Path, sums: Mapping[str, str]) -> None:
        self._folder, self._sums = folder, sums
        prefix, suffix = _tensor_file("|").split("|")
        self._stems = [name[len(prefix) : -len(suffix)] for name in sums if name.endswith(suffix)]

    def __getitem__(self, stem: str) -> dict[str, Tensor]:
        if stem not in self._stems:
            raise KeyError(stem)
        path = self._folder / _tensor_file(stem)
        with storage("read", path):
            _verify(path, tensor_file.checksum(path), self._sums)
            return tensor_file.read(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stems)

    def __len__(self) -> int:
        return len(self._stems)


def _tensor_file(stem: str) -> str:
    return f"tensors-{stem}.safetensors"


def _checksum(*pieces: Buffer) -> str:
    found = hashlib.blake2b()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def _read_sums(folder: Path) -> dict[str, str]:
    lines = _read(folder / _SUMS).decode(errors="replace").splitlines()
    sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    present = {_STATE, *(path.name for path in folder.glob(_tensor_file("*")))}
    if sums.keys() != present:
        raise _damaged(folder / _SUMS, f"and the directory differ in {sorted(sums.keys() ^ present)}")
    return sums


def _read_verified(path: Path, sums: Mapping[str, str]) -> bytes:
    data = _read(path)
    _verify(path, _checksum(data), sums)
    return data


def _verify(path: Path, found: str, sums: Mapping[str, str]) -> None:
    if found != (expected := sums.get(path.name)):
        raise _damaged(path, f"has the BLAKE2b checksum {found[:16]}..., expected {expected and expected[:16] + '...'}")


def _read(path: Path) -> bytes:
    with storage("read", path):
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise _damaged(path, "is missing") from error


def _damaged(path: Path, found: str) -> CorruptLogError:
    return CorruptLogError(
        f"{path} {found}; the snapshot is damaged; restore its directory from a backup, or start again from the "
        f"learners with `diloco syncer --reseed`"
    )
