"""Replay: compute a run again from its files, and compare the result bit for bit.

1. Level "outer steps": replay starts from the oldest snapshots of the syncer and of its shards, and computes all outer
   steps in their logs again. The digests of the anchors must equal those on the tape.
2. Level "merges", if contributions were recorded from the start: replay merges all outer gradients again from the
   received bytes. They must equal those in the log. The anchors must equal those of snapshot and log in master,
   published values, momentum and chain.
3. The ledger's merged ranges must equal the ranges of the commits, and no range may occur twice. The ledger's totals
   must equal those of the summary.
4. Replay changes no file, and refuses a run that is being served. A damaged byte in a replayed file is an error, and so
   is a log that ends before the tape.

Source: our choice; the paper (Sec. 5) uses an event tape for replay.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from msgspec.structs import replace
from torch import Tensor

from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.manifest import plan_of
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.intervals import IntervalSet
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage.files import Buffer
from lightning_diloco.storage.local_runs import last_summary
from lightning_diloco.storage.redo_log import held, log_records
from lightning_diloco.storage.snapshots import Snapshot, SnapshotStore
from lightning_diloco.storage.tape import TAPE, read_tape
from lightning_diloco.syncer.anchors import AnchorStore, fragments_of
from lightning_diloco.syncer.contribution_archive import Recorded, read_commit, read_seed
from lightning_diloco.syncer.shards.layout import directory_of, num_shards_of
from lightning_diloco.syncer.shards.store import Gradient, Regenerated, decode, gradients
from lightning_diloco.syncer.shards.whole import no_files
from lightning_diloco.transport.base import Json

Level = Literal["merges", "outer steps"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay that found no difference.

    Args:
        level: depth of the replay; see the module docstring.
        num_merges: number of outer gradients merged again.
        num_outer_steps: number of outer steps computed again.
        num_digests: number of anchors compared with a digest on the tape.
        versions: final version of each fragment.
        tokens_merged: merged tokens, in token x fragment.
        is_summarized: the result was also compared with summary.json.
    """

    level: Level
    num_merges: int
    num_outer_steps: int
    num_digests: int
    versions: tuple[int, ...]
    tokens_merged: int
    is_summarized: bool


def replay(run_dir: Path) -> Replayed:
    """Compute a run again and compare the result with its files.

    Args:
        run_dir: RUN_DIR of a run that is not being served.

    Raises:
        CorruptLogError: a file is damaged, or a result differs.
        StorageError: there is nothing to replay, or the run is being served.
    """
    logs = [run_dir / "syncer" / "log"]
    logs += [directory_of(run_dir, k) / "log" for k in range(1, num_shards_of(run_dir))]
    with ExitStack() as holding:
        for log in logs:
            holding.enter_context(held(log))
        return _Replay(run_dir).run()


class _Replay:
    """A single replay of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._recorded = run_dir / "syncer" / "contributions"
        self._records: dict[tuple[int, int], records.CommitRecord] = {}
        self._gradients: dict[tuple[int, int], str] = {}
        self._merged: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        self._told: dict[tuple[int, int], str] = {}
        self._digests: set[tuple[int, int]] = set()
        self._saved: dict[int, tuple[dict[str, int], Snapshot]] = {}
        self._num_outer_steps = 0

    def run(self) -> Replayed:
        snapshot = SnapshotStore(self._run_dir / "syncer" / "snapshot").oldest()
        if snapshot is None:
            raise StorageError(
                f"{self._run_dir} has no start values: there is nothing to replay; wait until a learner trains"
            )
        tape_lsn = self._read_tape()
        self._state = SyncerState(run="")
        self._state.restore(codec.load(records.SavedState, snapshot.state["machine"]), 0.0)
        self._plan, self._config = plan_of(cast("Json", snapshot.state["manifest"]))
        num_shards = num_shards_of(self._run_dir)
        self._store = AnchorStore(self._plan, self._config)
        self._begin((0, num_shards), snapshot)
        last_lsn = self._redo(snapshot.lsn, SnapshotStore(self._run_dir / "syncer" / "snapshot").latest())
        if tape_lsn > last_lsn:
            raise _differs("the log", f"ends at lsn {last_lsn}", f"lsn {tape_lsn} as on the tape")
        for k in range(1, num_shards):
            self._redo_shard((k, num_shards))
        is_recorded = (self._recorded / "seed-0000.safetensors").exists()
        num_merges = sum(self._merge_again(p) for p in range(self._plan.num_fragments)) if is_recorded else 0
        if is_recorded:
            self._check_ranges()
        return Replayed(
            level="merges" if is_recorded else "outer steps",
            num_merges=num_merges,
            num_outer_steps=self._num_outer_steps,
            num_digests=len(self._digests),
            versions=self._versions,
            tokens_merged=self._state.ledger.totals().merged,
            is_summarized=self._check_summary(),
        )

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple(self._store.anchor(p).version for p in range(self._plan.num_fragments))

    # ------------------------------------------------------------------------------------------------ the outer steps

    def _read_tape(self) -> int:
        """Collect the digests on the tape; return its last lsn."""
        last_lsn = 0
        for line in read_tape(self._run_dir / TAPE):
            last_lsn = max(last_lsn, line["lsn"] or 0)
            if line["event"] == "commit" and "digest" in line:
                self._told[line["fragment"], line["version"]] = line["digest"]
        return last_lsn

    def _begin(self, part: tuple[int, int], snapshot: Snapshot) -> None:
        """Take the fragments of a part from its snapshot."""
        mine = AnchorStore(self._plan, self._config, part)
        numbers = cast("list[dict[str, int]]", snapshot.state["anchors"])
        mine.restore(numbers, snapshot.tensors)
        self._store.include(mine)
        self._saved |= {p: (each, snapshot) for p, each in zip(mine.mine, numbers, strict=True)}

    def _redo(self, snapshot_lsn: int, newest: Snapshot | None) -> int:
        """Apply the log, as a restart does, and compare with the newest snapshot; return the last lsn."""
        last_lsn, own = snapshot_lsn, list(self._saved)
        for record in log_records(self._run_dir / "syncer" / "log", snapshot_lsn + 1):
            last_lsn = max(last_lsn, record.lsn)
            change = records.decode(record.header)
            if isinstance(change, records.CommitRecord):
                self._records[change.fragment, change.version] = replace(change, shard_lsn=0)  # as with the payloads
                if change.fragment in own:
                    self._gradients[change.fragment, change.version] = _sha256(record.payload)
            if record.lsn <= snapshot_lsn:
                continue
            self._state.apply(change)
            if isinstance(change, records.CommitRecord) and change.fragment in own:
                self._step(change.fragment, record.payload, work=change.work, version=change.version)
            elif isinstance(change, records.Regenerated):
                self._store.regenerate(change.generation, own)
            if newest is not None and record.lsn == newest.lsn:
                for p in own:
                    found, wanted = self._store.anchor(p).tensors(), newest.tensors[f"fragment-{p:04d}"]
                    _compare(p, self._store.anchor(p).version, found, wanted, "the newest snapshot")
        return last_lsn

    def _redo_shard(self, part: tuple[int, int]) -> None:
        """Apply the log of a shard, up to the versions that the syncer has decided."""
        directory = directory_of(self._run_dir, part[0])
        snapshot = SnapshotStore(directory / "snapshot").oldest()
        if snapshot is None:
            raise no_files(self._run_dir, part[0])
        self._begin(part, snapshot)
        needed_lsn = snapshot.lsn + 1
        kept = set(gradients(log_records(directory / "log", needed_lsn)).values())
        versions = [fragment.version for fragment in self._state.rounds.fragments]
        for record in log_records(directory / "log", needed_lsn):
            change = decode(record.header)
            if isinstance(change, Gradient) and record.lsn in kept and change.version <= versions[change.fragment]:
                self._gradients[change.fragment, change.version] = _sha256(record.payload)
                if record.lsn > snapshot.lsn:
                    self._step(change.fragment, record.payload, work=change.work, version=change.version)
            elif isinstance(change, Regenerated) and record.lsn > snapshot.lsn:
                self._store.regenerate(change.generation, fragments_of(part, len(versions)))
        for p in fragments_of(part, len(versions)):
            if (found := self._store.anchor(p).version) != versions[p]:
                raise _differs(f"shard {part[0]}", f"ends with {_named(p, found)}", _named(p, versions[p]))

    def _step(self, p: int, gradient: memoryview, *, work: float, version: int) -> None:
        self._store.commit(p, gradient, work=work, version=version)
        self._num_outer_steps += 1
        self._check_digest(self._store, p)

    def _check_digest(self, store: AnchorStore, p: int) -> None:
        key = (p, store.anchor(p).version)
        told = self._told.get(key)
        if told is None:
            return
        if told != store.digest(p):
            raise _differs(_named(*key), f"has the digest {store.digest(p)[:16]}...", f"{told[:16]}... as on the tape")
        self._digests.add(key)

    # ----------------------------------------------------------------------------------------------------- the merges

    def _merge_again(self, p: int) -> int:
        """Compute a fragment from its start values and the received bytes; return the number of merges."""
        store = AnchorStore(self._plan, self._config)
        store.seed(p, read_seed(self._recorded / f"seed-{p:04d}.safetensors"))
        saved, snapshot = self._saved[p]
        final = self._store.anchor(p)
        for version in range(final.version + 1):
            if version > 0:
                self._commit_again(store, p, version)
            if version == saved["version"]:
                _advance(store, p, saved["generation"])
                _compare(p, version, store.anchor(p).tensors(), snapshot.tensors[f"fragment-{p:04d}"], "snapshot")
        _advance(store, p, final.generation)
        _compare(p, final.version, store.anchor(p).tensors(), final.tensors(), "snapshot and log")
        return final.version

    def _commit_again(self, store: AnchorStore, p: int, version: int) -> None:
        path = self._recorded / f"commit-{p:04d}-{version:08d}.safetensors"
        if not path.exists():
            raise _differs(f"{path}", "is missing", "a file for every commit since the start")
        recorded = read_commit(path)
        record = records.decode(recorded.record)
        assert isinstance(record, records.CommitRecord)
        if (record.fragment, record.version) != (p, version):
            raise _differs(f"{path}", f"holds {_named(record.fragment, record.version)}", _named(p, version))
        shares = _shares(path, recorded, record)
        gradient, found = store.merge(p, recorded.payloads, shares, recorded.max_norms)
        _check_kept(p, record, recorded, found.kept)
        key, found_hash = (p, version), _sha256(bytes_of(gradient))
        if (record, found_hash) != (self._records.get(key, record), self._gradients.get(key, found_hash)):
            raise _differs(_named(p, version), "was merged to other bits", "the outer gradient in the log")
        _advance(store, p, record.generation)
        store.commit(p, gradient, work=record.work, version=version)
        self._check_digest(store, p)
        for merge in record.merges:
            self._merged[merge.session, p].append((merge.ready.start, merge.stop))

    # ----------------------------------------------------------------------------------------------------- the ledger

    def _check_ranges(self) -> None:
        """Check that the ledger's merged ranges equal those of the commits, and that none occurs twice."""
        for member in self._state.roster.members.values():
            account = self._state.account(member)
            for p in range(self._plan.num_fragments):
                try:
                    wanted = IntervalSet(self._merged[member.session, p])
                except ValueError as error:
                    raise _differs(f"{member.learner}, fragment {p}", str(error), "each token merged once") from error
                wanted.settle(account.merged[p].floor)
                if wanted != account.merged[p]:
                    what = f"the ledger of {member.learner} #{member.incarnation}, fragment {p},"
                    raise _differs(what, f"has {account.merged[p]}", f"{wanted} as in the commits")

    def _check_summary(self) -> bool:
        """Compare with summary.json if it describes this state; return whether it does."""
        if (summary := last_summary(self._run_dir)) is None:
            return False
        self._state.finish()
        totals = self._state.ledger.totals()
        found: Json = {"versions": list(self._versions), "tokens_merged": totals.merged}
        if summary["status"] == "finished":  # otherwise learners may have reported more than the log holds
            found |= {"tokens_seen": totals.seen, "tokens_pending": totals.pending}
            found |= {"tokens_discarded": {cause: n for cause, n in totals.discarded.items() if n}}
            summary["tokens_discarded"] = {cause: n for cause, n in summary["tokens_discarded"].items() if n}
        for name, value in found.items():
            if summary[name] != value:
                raise _differs(name, f"is {value}", f"{summary[name]} as in {self._run_dir / 'summary.json'}")
        return True


def _sha256(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def _shares(path: Path, recorded: Recorded, record: records.CommitRecord) -> list[float]:
    """Return the contributors' shares, in the order of the merge."""
    shares = {merge.session: merge.share for merge in record.merges}
    if sorted(shares) != sorted(recorded.sessions):
        raise _differs(f"{path}", f"holds contributions of {sorted(recorded.sessions)}", f"{sorted(shares)}")
    return [shares[session] for session in recorded.sessions]


def _check_kept(p: int, record: records.CommitRecord, recorded: Recorded, found: Sequence[float]) -> None:
    wanted = {merge.session: merge.kept for merge in record.merges}
    kept = dict(zip(recorded.sessions, found, strict=True))
    if kept != wanted:
        raise _differs(_named(p, record.version), f"merges these parts of its contributions: {kept}", f"{wanted}")


def _advance(store: AnchorStore, p: int, generation: int) -> None:
    """Begin a new generation, unless it has begun."""
    if generation > store.anchor(p).generation:
        store.regenerate(generation, [p])


def _compare(p: int, version: int, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    for name in found:
        if bytes_of(found[name]) != bytes_of(wanted[name]):
            raise _differs(f"{name} of {_named(p, version)}", "has other bits", f"those of {where}")


def _named(p: int, version: int) -> str:
    return f"fragment {p} at version {version}"


def _differs(what: str, found: str, allowed: str) -> CorruptLogError:
    return CorruptLogError(f"{what} {found}; must be {allowed}; the run directory is damaged: restore it from a backup")
