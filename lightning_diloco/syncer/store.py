"""The syncer's state on disk: redo log, snapshots and tape of one run directory, and the way back from them.

1. Nothing counts before `sync` returned: the log comes first, then tensors and messages.
2. `restore` is snapshot + log. It changes state by the very records the live machine wrote, so what comes out is what
   was there: anchors, momentum, versions and ledger, bit for bit.
3. A snapshot is due when the log has grown as large as the state; log and snapshot stay under three times that size.
   A clean stop writes one, too, beside the one that the log follows on; while the next is written there are three.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from lightning_diloco.errors import ConfigError, CorruptLogError, PlanMismatchError, StorageError
from lightning_diloco.manifest import plan_of
from lightning_diloco.process.parallel import ByFragment
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage.files import Buffer, Faults, no_faults
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.storage.snapshots import SnapshotStore
from lightning_diloco.storage.tape import Tape, read_tape
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.status.history import History, recall
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)

MIN_LOG_BYTES = 8 << 20
SNAPSHOT_AGAIN_S = 30.0


class SyncerStore:
    """Log, snapshots and tape of one run.

    Args:
        run_dir: RUN_DIR.
        faults: hook at named points, for crash tests.
        locked: called when the directory is this process's, before anything is read.
        tell: told in words how far opening and `restore` are.

    Attributes:
        past: the run before this process, once it is restored.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        faults: Faults = no_faults,
        locked: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._tell = tell
        self.log = RedoLog(run_dir / "syncer" / "log", faults=faults, locked=locked, tell=tell)
        self.snapshots = SnapshotStore(run_dir / "syncer" / "snapshot", faults=faults)
        self.tape = Tape(run_dir / "tape" / "events.jsonl")
        self.past = History()
        self._writing: threading.Thread | None = None
        self._snapshot_again_s = 0.0
        self._tape_failed = False
        # A failed fsync takes back everything since the last good one: never two writers' records at once.
        self._one_record = threading.Lock()

    def restore(self, state: SyncerState, now_s: float) -> AnchorStore | None:
        """Bring a fresh machine, and the anchors, to where the disk says they were.

        Returns:
            The anchors; None if the run has no start values yet.

        Raises:
            CorruptLogError: what had been durable cannot be read back.
        """
        unix_s = time.time()  # the moment of now_s
        in_log: list[Json] = []
        snapshot = self.snapshots.latest()
        store = None
        if snapshot is not None:
            state.restore(codec.load(records.SavedState, snapshot.state["machine"]), now_s)
            store = _new_store(cast("Json", snapshot.state["manifest"]))
        with ByFragment(len(store.layouts) if store else 1) as threads:
            if snapshot is not None and store is not None:
                self._tell("its snapshot is read")
                store.restore(cast("list[Any]", snapshot.state["anchors"]), snapshot.tensors, do=threads.do)
                threads.settle()
            for record in self.log.records(snapshot.lsn + 1 if snapshot else self.log.first_lsn):
                self._tell(f"its log is replayed, record {record.lsn} of {self.log.last_lsn}")
                change = records.decode(record.header)
                state.apply(change)
                in_log += _told_of(change, state)
                if isinstance(change, records.CommitRecord):
                    if store is None:
                        raise CorruptLogError(
                            f"log record {record.lsn} is a commit, but no snapshot has the start values"
                        )
                    follows = {"work": change.work, "version": change.version, "in_place": True}
                    threads.do(change.fragment, store.commit, change.fragment, record.payload, **follows)
                elif isinstance(change, records.Regenerated) and store is not None:
                    threads.settle()
                    store.regenerate(change.generation)
            threads.settle()
            self._tell("digests are taken")
            for p in range(len(store.layouts) if store and store.is_seeded else 0):
                threads.do(p, cast("AnchorStore", store).digest, p)
        self.tape.truncate_after(self.log.last_lsn)
        self.past = recall(state.roster, self._completed_tape(in_log), now_s=now_s, unix_s=unix_s)
        if state.manifest is None or store is None:
            return None  # a seed that was stored but never recorded is stored again
        state.set_digests(store.digests())
        state.resume(now_s)
        return store

    def _completed_tape(self, in_log: Sequence[Json]) -> Iterator[Json]:
        """The tape, read once, for it is long; who joined and left and is only in the log is told at its end, late."""
        on_tape: list[Json] = []
        for line in read_tape(self.tape.path):
            if line["event"] in ("join", "leave"):
                on_tape.append(line)
            yield line
        for told in in_log:
            if not any(told.items() <= line.items() for line in on_tape):
                self.note(**told, restored=True)
                yield {**told, "t": time.time()}

    def write(self, record: Json, payload: Buffer = b"") -> None:
        """Append a record and make it durable, or raise `StorageError` and leave the log as it was."""
        with self._one_record:
            self.log.append(record, payload)
            self.log.sync()

    def note(self, event: str, *, late_s: float = 0.0, **fields: object) -> None:
        """Write a line to the tape. A full disk loses the line, not the run: the log has what counts."""
        try:
            self.tape.record(event, lsn=max(self.log.last_lsn, self.tape.last_lsn), late_s=late_s, **fields)
            self._tape_failed = False
        except StorageError as error:
            if not self._tape_failed:
                log.warning("the tape misses %s and what follows: %s", event, error)
            self._tape_failed = True

    def store_seed(self, state: Json, manifest: Json, store: AnchorStore) -> None:
        """Make a run's start values durable."""
        self._write(self.log.last_lsn, state, manifest, *store.freeze())

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def is_snapshot_due(self, store: AnchorStore) -> bool:
        """Whether the log has grown as large as the state, and no attempt failed a moment ago."""
        if self.is_writing or time.monotonic() < self._snapshot_again_s:
            return False
        return self.log.nbytes > max(MIN_LOG_BYTES, sum(12 * layout.padded_numel for layout in store.layouts))

    def begin_snapshot(self, machine: Json, manifest: Json, store: AnchorStore) -> None:
        """Write a snapshot of this moment in the background; commits go on meanwhile.

        No commit may be between its log record and its installation. A disk that does not take it makes the log grow,
        and is tried again after SNAPSHOT_AGAIN_S.
        """
        try:
            self.tape.sync()
            self.log.rotate()
        except StorageError as error:
            self._snapshot_failed(error)
            return
        lsn, frozen = self.log.last_lsn, store.freeze()

        def write() -> None:
            try:
                self._write(lsn, machine, manifest, *frozen)
                self.log.drop_before(lsn + 1)
            except Exception as error:
                self._snapshot_failed(error)

        self._writing = threading.Thread(target=write, name="diloco-snapshot", daemon=True)
        self._writing.start()

    def _snapshot_failed(self, error: Exception) -> None:
        self._snapshot_again_s = time.monotonic() + SNAPSHOT_AGAIN_S
        log.error("no snapshot was written, the log goes on growing: %s", error)

    def _write(
        self, lsn: int, machine: Json, manifest: Json, numbers: Any, tensors: Any, *, keeps_oldest: bool = False
    ) -> None:
        state = {"machine": machine, "manifest": manifest, "anchors": numbers}
        self.snapshots.write(lsn, state, tensors, keeps_oldest=keeps_oldest)

    def rest(self, machine: Json, manifest: Json, store: AnchorStore, *, keeps_log: bool) -> None:
        """At a clean stop: a last snapshot, so that the next start has no log to replay.

        Nothing may be on its way to disk. A disk that does not take it leaves things as they were.

        Args:
            machine, manifest, store: what to write.
            keeps_log: also keep the log, and the snapshot that it begins after, so that the run can be computed again.
        """
        if self._writing is not None:
            self._writing.join()
        try:
            self.tape.sync()
            self.log.sync()
            self._write(self.log.last_lsn, machine, manifest, *store.freeze(), keeps_oldest=keeps_log)
            if not keeps_log:
                self.log.rotate()
                self.log.drop_before(self.log.last_lsn + 1)
        except StorageError as error:
            log.warning("no last snapshot was written, the next start replays the log: %s", error)

    def close(self) -> None:
        """Wait for a snapshot being written, and let go of all files; raises `StorageError`."""
        if self._writing is not None:
            self._writing.join()
        try:
            self.log.close()
        finally:
            self.tape.close()


def _told_of(change: records.LogRecord, state: SyncerState) -> list[Json]:
    """What the tape has about this record, if it is one that figures of the whole run need; the state is after it."""
    match change:
        case records.Activated():
            member = state.roster[change.session]
            return [{"event": "join", "learner": member.learner, "incarnation": member.incarnation}]
        case records.Departed():
            learner = state.roster[change.session].learner
            return [{"event": "leave", "learner": learner, "reason": change.reason, "tokens": change.progress.tokens}]
    return []


def seeded_store(manifest: Json, values: Sequence[Tensor]) -> AnchorStore:
    """Anchors at version 0.

    Args:
        manifest: as the seeder sent it.
        values: of every fragment, float32 (P,).

    Raises:
        PlanMismatchError: no plan, or another one, follows from the manifest; or the values do not fit it.
        NonFiniteError: NaN or Inf among the values.
    """
    try:
        _check_size(manifest["shapes"], values)
        plan, config = plan_of(manifest)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanMismatchError(
            f"no plan follows from the manifest ({type(error).__name__}: {error}); it must have config, shapes and "
            "mean_names; do both sides run the same version?"
        ) from error
    if (plan.digest, plan.num_fragments) != (manifest["plan_digest"], len(values)):
        raise PlanMismatchError(
            f"the manifest has the plan digest {manifest['plan_digest']!s:.12} for {len(values)} fragments, what "
            f"follows from it {plan.digest:.12} for {plan.num_fragments}; they must be equal; do both sides run the "
            "same version?"
        )
    store = AnchorStore(plan, config)
    for p, values_P in enumerate(values):
        store.seed(p, values_P)
    return store


def _check_size(shapes: Mapping[str, Sequence[int]], values: Sequence[Tensor]) -> None:
    """Before a plan is computed for shapes that nobody sent values of."""
    claimed, came = sum(map(math.prod, shapes.values())), sum(each.numel() for each in values)
    if claimed > came:
        raise PlanMismatchError(
            f"the manifest has shapes of {claimed} values, {came} came; all must; do both sides run the same version?"
        )


def _new_store(manifest: Json) -> AnchorStore:
    return AnchorStore(*plan_of(manifest))
