"""The disk of a shard's process: outer gradients, and snapshots of its fragments.

    DIR/log        outer gradients, in the order in which they were prepared
    DIR/snapshot   anchors

1. A gradient is on disk before the syncer decides about it. The last gradient of each fragment is undecided until the
   syncer says which version the run has. All earlier ones were decided, because a fragment has at most one undecided
   version.
2. A gradient that was not decided is withdrawn by a record of its own.
3. A snapshot is written when the log has grown as large as the state, and no version is undecided.

Source: our choice, after two-phase commit; the syncer is the coordinator.
"""

from __future__ import annotations

import threading
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.errors import ConfigError, CorruptLogError, StorageError
from lightning_diloco.manifest import plan_of
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Tagged
from lightning_diloco.protocol.limits import Count, Finite
from lightning_diloco.protocol.syncer.records import CommitRecord
from lightning_diloco.storage.files import Faults, no_faults, remove_tree
from lightning_diloco.storage.redo_log import Record, RedoLog
from lightning_diloco.storage.snapshots import SnapshotStore, Tensors
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.store import seeded_store
from lightning_diloco.transport.base import Json


class Gradient(Tagged, frozen=True):
    """The payload of this record is the outer gradient of an undecided version, bfloat16 (P,)."""

    fragment: Count
    version: Count
    work: Finite


class Withdrawn(Tagged, frozen=True):
    """This version was not decided."""

    fragment: Count
    version: Count


class Regenerated(Tagged, frozen=True):
    """A new generation has begun."""

    generation: Count


ShardRecord = Gradient | Withdrawn | Regenerated
_KINDS: dict[str, type[ShardRecord]] = {kind.__name__: kind for kind in typing.get_args(ShardRecord)}


def decode(header: Json) -> ShardRecord:
    """Return a record of a shard's log. Raises `CorruptMessageError`."""
    return codec.load_tagged(_KINDS, header, "a record of a shard's log")


@dataclass(frozen=True, slots=True)
class Undecided:
    """A version that was prepared, with its outer gradient, bfloat16 (P,)."""

    version: int
    work: float
    gradient: Tensor


def gradients(records: Iterable[Record]) -> dict[tuple[int, int], int]:
    """Return the lsn of each outer gradient that was not withdrawn, by (fragment, version)."""
    found: dict[tuple[int, int], int] = {}
    for record in records:
        change = decode(record.header)
        if isinstance(change, Gradient):
            found[change.fragment, change.version] = record.lsn
        elif isinstance(change, Withdrawn):
            found.pop((change.fragment, change.version), None)  # it may be older than these records
    return found


def cut_back(directory: Path, versions: Sequence[int]) -> None:
    """Remove the outer gradients of later versions than these from a shard's log.

    One thread prepares and decides the versions of a shard, so they are the end of the log.

    Args:
        directory: DIR.
        versions: version of each fragment of the run.
    """
    log = RedoLog(directory / "log")
    try:
        found = gradients(log.records(log.first_lsn))
        later = [lsn for (p, version), lsn in found.items() if version > versions[p]]
        if later:
            log.cut_after(min(later) - 1)
    finally:
        log.close()


class ShardStore:
    """Log and snapshots of one shard.

    Args:
        directory: DIR.
        part: (shard, number of shards).
        faults: hook at named points, for crash tests.

    Attributes:
        log, snapshots: the files.
        anchors: the fragments; None before the run has start values.
        undecided: the last version of a fragment in the log, if it may be undecided.
        changing: lock for changes of `undecided` and `anchors`, which a snapshot must not see halfway.
    """

    def __init__(self, directory: Path, part: tuple[int, int], *, faults: Faults = no_faults) -> None:
        self._part = part
        self.log = RedoLog(directory / "log", faults=faults)
        self.snapshots = SnapshotStore(directory / "snapshot", faults=faults)
        self._manifest: Json = {}
        self.changing = threading.RLock()
        self.anchors: AnchorStore | None = None
        self.undecided: dict[int, Undecided] = {}
        try:
            self._load()
        except BaseException:
            self.log.close()
            raise

    def _load(self) -> None:
        snapshot = self.snapshots.latest()
        if snapshot is None:
            return
        if (found := tuple(cast("list[int]", snapshot.state["part"]))) != self._part:
            raise ConfigError(
                f"{self.snapshots.directory} is of shard {found[0]} of {found[1]}; this is shard {self._part[0]} of "
                f"{self._part[1]}; each shard of a run needs its own directory"
            )
        self._manifest = cast("Json", snapshot.state["manifest"])
        self.anchors = store = AnchorStore(*plan_of(self._manifest), self._part)
        store.restore(cast("list[Any]", snapshot.state["anchors"]), snapshot.tensors)
        for record in self.log.records(snapshot.lsn + 1):
            self._follow(record, in_place=True)

    def _follow(self, record: Record, *, in_place: bool) -> None:
        """Apply a record of the log."""
        assert self.anchors is not None
        change = decode(record.header)
        if isinstance(change, Gradient):
            self._apply(change.fragment, in_place=in_place)
            gradient = tensor_of(record.payload, torch.bfloat16).clone()
            self.undecided[change.fragment] = Undecided(change.version, change.work, gradient)
        elif isinstance(change, Withdrawn):
            self.undecided.pop(change.fragment)
        else:
            for p in list(self.undecided):
                self._apply(p, in_place=in_place)
            self.anchors.regenerate(change.generation)

    def copy(self, copied: Sequence[Record]) -> None:
        """Make the next records of the primary's shard durable, and apply them; see `RedoLog.copy`. For a standby."""
        with self.changing:  # no snapshot includes a record without its version
            self.log.copy(copied)
            for record in copied:
                self._follow(record, in_place=False)

    def decided(self, p: int, version: int) -> None:
        """Install the undecided version of fragment p if it is at most `version`, the decided version."""
        with self.changing:
            if (found := self.undecided.get(p)) is not None and found.version <= version:
                self._apply(p, in_place=False)

    def _apply(self, p: int, *, in_place: bool) -> None:
        """Install an undecided version that turns out to be decided, if there is one."""
        found = self.undecided.pop(p, None)
        if found is not None:
            assert self.anchors is not None
            self.anchors.commit(p, found.gradient, work=found.work, version=found.version, in_place=in_place)
            if not in_place:
                self.anchors.compute_digest(p)

    def check(self, positions: Mapping[int, int]) -> None:
        """Check that this shard has these versions.

        Args:
            positions: version of each fragment in the run.

        Raises:
            CorruptLogError: it has others, so its files or the syncer's were lost or replaced.
        """
        assert self.anchors is not None
        for p, version in positions.items():
            found, own = self.undecided.get(p), self.anchors.anchor(p).version
            if version != own and (found is None or found.version != version):
                raise CorruptLogError(
                    f"shard {self._part[0]} has fragment {p} at version {own}; the run has it at version {version}; "
                    "restore the syncer's directory and those of all shards as of one moment"
                )

    def settle(self, positions: Mapping[int, int]) -> None:
        """Install the undecided versions that were decided, and withdraw the others; see `check`."""
        self.check(positions)
        for p, version in positions.items():
            found = self.undecided.get(p)
            if found is not None and found.version != version:
                self._append(Withdrawn(p, found.version))
                del self.undecided[p]
            self._apply(p, in_place=False)

    def write(self, commit: CommitRecord, gradient: Tensor) -> int:
        """Make the outer gradient of an undecided version durable; return its lsn. Raises `StorageError`."""
        p = commit.fragment
        with self.changing:  # before the record, so that no snapshot includes the record without the version
            self.undecided[p] = Undecided(commit.version, commit.work, gradient)
        try:
            return self._append(Gradient(p, commit.version, commit.work), gradient)
        except StorageError:
            del self.undecided[p]
            raise

    @property
    def generation(self) -> int:
        """Generation of the fragments, which all have the same."""
        assert self.anchors is not None
        return self.anchors.anchor(self.anchors.mine[0]).generation

    def regenerate(self, generation: int) -> None:
        """Begin a generation. No version may be undecided."""
        assert self.anchors is not None
        with self.changing:
            self._append(Regenerated(generation))
            self.anchors.regenerate(generation)

    def _append(self, record: Tagged, gradient: Tensor | None = None) -> int:
        lsn = self.log.append(codec.dump(record), b"" if gradient is None else bytes_of(gradient))
        self.log.sync()
        return lsn

    # ----------------------------------------------------------------------------------------------------- snapshots

    def forget(self) -> None:
        """Drop start values that the run's log does not have."""
        self.anchors = None
        self.snapshots.wait()
        remove_tree(self.snapshots.directory)

    def store_seed(self, manifest: Json, values: Mapping[int, Tensor], num_values: int) -> AnchorStore:
        """Make start values durable; see `seeded_store`."""
        store = seeded_store(manifest, values, part=self._part, num_values=num_values)
        self._manifest = manifest
        self.snapshots.wait()
        remove_tree(self.snapshots.directory)
        self.snapshots.write(self.log.last_lsn, *self._content(store))
        self.anchors = store
        return store

    def snapshot_if_due(self) -> None:
        """Begin to write a snapshot if the log has grown as large as the state, and no version is undecided."""
        store = self.anchors
        if store is None or not self.snapshots.is_due(self.log, store.nbytes):
            return
        with self.changing:  # another thread may have begun one meanwhile
            if not self.undecided and self.snapshots.is_due(self.log, store.nbytes):
                self.snapshots.begin(self.log, *self._content(store))

    def _content(self, store: AnchorStore) -> tuple[Json, Tensors]:
        """Return state and tensors for a snapshot."""
        numbers, tensors = store.freeze()
        return {"manifest": self._manifest, "anchors": numbers, "part": list(self._part)}, tensors

    def close(self) -> None:
        """Wait for a snapshot that is being written, and close the files."""
        self.snapshots.wait()
        self.log.close()
