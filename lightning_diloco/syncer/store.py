"""The syncer's state on disk: redo log, snapshots and tape of a run directory, and how to restore them.

1. A record is durable when `sync` has returned. Only then the syncer installs tensors and sends messages.
2. `restore` loads a snapshot and applies the log to it. It applies the records that the live machine wrote, so anchors,
   momentum, versions and ledger are restored bit for bit.
3. A clean stop writes a snapshot, and keeps the snapshot that the log starts from.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from lightning_diloco.errors import ConfigError, CorruptLogError, PlanMismatchError, StorageError
from lightning_diloco.manifest import plan_of
from lightning_diloco.process.parallel import ByFragment
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.succession import IN_FLIGHT, Fleets
from lightning_diloco.storage.files import Buffer, Faults, no_faults
from lightning_diloco.storage.redo_log import Record, RedoLog
from lightning_diloco.storage.snapshots import SnapshotStore, Tensors
from lightning_diloco.storage.tape import TAPE, Tape, read_tape
from lightning_diloco.syncer.anchors import WHOLE, AnchorStore
from lightning_diloco.syncer.status.history import History, Recollection
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)


class SyncerStore:
    """Log, snapshots and tape of one run.

    Args:
        run_dir: RUN_DIR.
        faults: hook at named points, for crash tests.
        locked: called when this process has locked the directory, before anything is read.
        tell: called with a description of the progress of opening and `restore`.
        num_shards: number of shards of the run.

    Attributes:
        past: history of the run before this process; set by `restore`.
        restored: what was read from disk, {"snapshot_lsn", "num_records"}; None before `load`, and for a new run.
        fleets: learners in the run now, and learners before the last record that may have changed them. Set by
            `restore`. A standby may lack this last record, but no earlier record that changed the fleet.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        faults: Faults = no_faults,
        locked: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
        num_shards: int = 1,
    ) -> None:
        self.part = (0, num_shards)
        self._tell = tell
        self.log = RedoLog(run_dir / "syncer" / "log", faults=faults, locked=locked, tell=tell)
        self.snapshots = SnapshotStore(run_dir / "syncer" / "snapshot", faults=faults)
        self.tape = Tape(run_dir / TAPE)
        self.past = History()
        self.restored: Json | None = None
        self._recollection = Recollection()
        self._in_log: list[Json] = []  # joins and leaves in the log that may be missing on the tape
        self.fleets = Fleets()
        self._tape_failed = False
        # A failed fsync undoes all writes since the last successful fsync, so only one record is written at a time.
        self._one_record = threading.Lock()

    def restore(self, state: SyncerState, now_s: float) -> AnchorStore | None:
        """Restore the state machine and the anchors from disk.

        Args:
            state: a new state machine; changed in place.
            now_s: current time on its clock.

        Returns:
            The anchors; None if the run has no start values yet.

        Raises:
            CorruptLogError: a durable file is damaged.
        """
        unix_s = time.time()  # the moment of now_s
        store = self.load(state, now_s)
        self._remember(state, now_s, unix_s)
        return self._resumed(state, store, now_s)

    def load(self, state: SyncerState, now_s: float) -> AnchorStore | None:
        """Restore a machine that only follows. Start values without a log record are returned as well."""
        self._in_log.clear()
        snapshot = self.snapshots.latest()
        store = None
        if snapshot is not None:
            state.restore(codec.load(records.SavedState, snapshot.state["machine"]), now_s)
            store = AnchorStore(*plan_of(cast("Json", snapshot.state["manifest"])), self.part)
        num_records = 0
        with ByFragment(len(store.layouts) if store else 1) as threads:
            if snapshot is not None and store is not None:
                self._tell("reading the snapshot")
                store.restore(cast("list[Any]", snapshot.state["anchors"]), snapshot.tensors, do=threads.do)
                threads.settle()
            before = state.roster.fleet()
            for record in self.log.records(snapshot.lsn + 1 if snapshot else self.log.first_lsn):
                self._tell(f"replaying the log, record {record.lsn} of {self.log.last_lsn}")
                num_records += 1
                change = records.decode(record.header)
                if record.header["kind"] not in IN_FLIGHT:
                    before = state.roster.fleet()
                state.apply(change)
                self._in_log += _told_of(change, state)
                if isinstance(change, records.CommitRecord):
                    if store is None:
                        raise CorruptLogError(
                            f"log record {record.lsn} is a commit, but no snapshot has the start values"
                        )
                    if change.fragment not in store.mine:
                        continue  # its shard has the outer gradient
                    follows = {"work": change.work, "version": change.version, "in_place": True}
                    threads.do(change.fragment, store.commit, change.fragment, record.payload, **follows)
                elif isinstance(change, records.Regenerated) and store is not None:
                    threads.settle()
                    store.regenerate(change.generation)
            threads.settle()
            self._tell("computing digests")
            for p in store.mine if store and store.is_seeded else ():
                threads.do(p, cast("AnchorStore", store).digest, p)
        if snapshot is not None or num_records:
            self.restored = {"snapshot_lsn": snapshot.lsn if snapshot else None, "num_records": num_records}
        self.fleets = Fleets.only(before).or_(state.roster.fleet())
        self._read_tape()
        return store

    def take_over(
        self, state: SyncerState, followed: SyncerState, store: AnchorStore, now_s: float
    ) -> AnchorStore | None:
        """Do the same as `restore`, with the records that `follow` has applied to another machine and these anchors."""
        state.restore(followed.saved(), now_s)
        self._remember(state, now_s, time.time())
        return self._resumed(state, store, now_s)

    def _resumed(self, state: SyncerState, store: AnchorStore | None, now_s: float) -> AnchorStore | None:
        if state.manifest is None or store is None:
            return None  # start values without a log record are stored again
        state.set_digests(dict(zip(store.mine, store.digests(), strict=True)))
        state.resume(now_s)
        return store

    def _read_tape(self) -> None:
        """Cut the tape to the log, and read it."""
        self._tell("reading the tape")
        self.tape.truncate_after(self.log.last_lsn)
        self._recollection = Recollection()
        for line in read_tape(self.tape.path):
            self._recollection.add(line)

    def _remember(self, state: SyncerState, now_s: float, unix_s: float) -> None:
        """Append the joins and leaves that are only in the log to the tape, and recall the history of the run."""
        for told in self._in_log:
            if not self._recollection.has(told):
                self.note(**told, restored=True)
                self._recollection.add({**told, "t": time.time()})
        self._in_log.clear()
        self.past = self._recollection.recall(state.roster, now_s=now_s, unix_s=unix_s)

    def follow_tape(self, text: bytes) -> None:
        """Append the next lines of the primary's tape, up to those that are ahead of this log."""
        for line in self.tape.copy(text, self.log.last_lsn):
            self._recollection.add(line)
        self._in_log = [told for told in self._in_log if not self._recollection.has(told)]

    def follow(self, copied: Sequence[Record], state: SyncerState, store: AnchorStore) -> None:
        """Apply records as a restart does.

        Args:
            copied: the next records, in order.
            state, store: as restored; changed in place.

        Raises:
            CorruptLogError: a record does not follow the current state.
        """
        for record in copied:
            change = records.decode(record.header)
            state.apply(change)
            self._in_log += _told_of(change, state)
            if isinstance(change, records.CommitRecord):
                if change.fragment in store.mine:  # otherwise its shard has the outer gradient
                    store.commit(change.fragment, record.payload, work=change.work, version=change.version)
                    store.compute_digest(change.fragment)
            elif isinstance(change, records.Regenerated):
                store.regenerate(change.generation)

    def write(self, record: Json, payload: Buffer = b"") -> int:
        """Append a record and make it durable; return its lsn. If this raises `StorageError`, the log is unchanged."""
        with self._one_record:
            lsn = self.log.append(record, payload)
            self.log.sync()
            return lsn

    def note(self, event: str, *, late_s: float = 0.0, **fields: object) -> None:
        """Write a line to the tape; if the disk is full, the line is lost and the run continues."""
        try:
            self.tape.record(event, lsn=max(self.log.last_lsn, self.tape.last_lsn), late_s=late_s, **fields)
            self._tape_failed = False
        except StorageError as error:
            if not self._tape_failed:
                log.warning("the tape misses %s and the following events: %s", event, error)
            self._tape_failed = True

    def store_seed(self, state: Json, manifest: Json, store: AnchorStore) -> None:
        """Make a run's start values durable."""
        self.snapshots.write(self.log.last_lsn, *_content(state, manifest, store))

    def is_snapshot_due(self, store: AnchorStore) -> bool:
        """Return whether the log has grown as large as the state; see `SnapshotStore.is_due`."""
        return self.snapshots.is_due(self.log, store.nbytes)

    def begin_snapshot(
        self,
        machine: Json,
        manifest: Json,
        store: AnchorStore,
        *,
        before_drop: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Write a snapshot of the current state in the background, while commits continue; see `SnapshotStore.begin`.

        No commit may be between its log record and its installation.
        """
        content = _content(machine, manifest, store)
        self.snapshots.begin(self.log, *content, before=self.tape.sync, before_drop=before_drop)

    def rest(self, machine: Json, manifest: Json, store: AnchorStore, *, keeps_log: bool) -> None:
        """Write a last snapshot at a clean stop, so that the next start has no log to replay.

        No write may be in progress. If writing fails, the files stay as they are.

        Args:
            machine, manifest, store: state to write.
            keeps_log: also keep the log, and the snapshot that it starts from, for a replay.
        """
        self.snapshots.wait()
        try:
            self.tape.sync()
            self.log.sync()
            content = _content(machine, manifest, store)
            self.snapshots.write(self.log.last_lsn, *content, keeps_oldest=keeps_log)
            if not keeps_log:
                self.log.rotate()
                self.log.drop_before(self.log.last_lsn + 1)
        except StorageError as error:
            log.warning("the last snapshot was not written, the next start replays the log: %s", error)

    def close(self) -> None:
        """Wait for a snapshot that is being written, and close all files. Raises `StorageError`."""
        self.snapshots.wait()
        try:
            self.log.close()
        finally:
            self.tape.close()


def _content(machine: Json, manifest: Json, store: AnchorStore) -> tuple[Json, Tensors]:
    """Return state and tensors for a snapshot."""
    numbers, tensors = store.freeze()
    return {"machine": machine, "manifest": manifest, "anchors": numbers}, tensors


def _told_of(change: records.LogRecord, state: SyncerState) -> list[Json]:
    """Return the tape lines of a record for the statistics of the run; `state` already includes the record."""
    match change:
        case records.Activated():
            member = state.roster[change.session]
            return [{"event": "join", "learner": member.learner, "incarnation": member.incarnation}]
        case records.Departed():
            learner = state.roster[change.session].learner
            return [{"event": "leave", "learner": learner, "reason": change.reason, "tokens": change.progress.tokens}]
    return []


def seeded_store(
    manifest: Json, values: Mapping[int, Tensor], *, part: tuple[int, int] = WHOLE, num_values: int | None = None
) -> AnchorStore:
    """Create anchors at version 0 from start values.

    Args:
        manifest: the seeder's manifest.
        values: start values of each fragment of this part, float32 (P,).
        part: (shard, number of shards).
        num_values: number of start values of all parts; None: these are all.

    Raises:
        PlanMismatchError: the manifest is invalid, its digest is not that of its plan, or the values do not fit.
        NonFiniteError: the values hold NaN or Inf.
    """
    try:
        came = sum(each.numel() for each in values.values()) if num_values is None else num_values
        _check_size(manifest["shapes"], came)
        plan, config = plan_of(manifest)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanMismatchError(
            f"no plan can be made from the manifest ({type(error).__name__}: {error}); it must have config, shapes and "
            "mean_names; do both sides run the same version?"
        ) from error
    store = AnchorStore(plan, config, part)
    if (plan.digest, [*store.mine]) != (manifest["plan_digest"], sorted(values)):
        raise PlanMismatchError(
            f"the manifest has the plan digest {manifest['plan_digest']!s:.12} for {len(values)} fragments, its plan "
            f"has {plan.digest:.12} for {len(store.mine)}; they must be equal; do both sides run the same version?"
        )
    if not store.mine:
        raise PlanMismatchError(
            f"the run has {plan.num_fragments} fragments for {part[1]} shards; each shard needs one; start the run "
            "with fewer --shards, or with a larger num_fragments"
        )
    for p, values_P in values.items():
        store.seed(p, values_P)
    return store


def _check_size(shapes: Mapping[str, Sequence[int]], came: int) -> None:
    """Refuse shapes with more values than were sent, before a plan is computed for them."""
    claimed = sum(map(math.prod, shapes.values()))
    if claimed > came:
        raise PlanMismatchError(
            f"the shapes in the manifest have {claimed} values, but {came} came; do both sides run the same version?"
        )
