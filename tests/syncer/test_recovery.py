"""Log, snapshots and anchors together: a kill or a power cut at any point loses nothing that was announced.

A small syncer commits from a fixed list of outer gradients, so its state is a function of the number of commits (the
reference). `Disk` records what was fsynced, and creates the image that a power cut would leave: any part of a file that
was not fsynced may be missing, and so may any name whose directory was not fsynced.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from lightning_diloco.config import RunConfig
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage import files, snapshots
from lightning_diloco.storage.files import Buffer
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.storage.snapshots import SnapshotStore
from lightning_diloco.syncer.anchors import AnchorStore
from tests.storage.faults import POINTS, Crash, Faults, kill

NUM_COMMITS = 12
NUM_FRAGMENTS = 2
PLAN = FragmentPlan.balanced({"a": (8, 8), "b": (64,)}, num_fragments=NUM_FRAGMENTS, max_slice_numel=1 << 20)
CONFIG = RunConfig(sync_every=8, num_fragments=NUM_FRAGMENTS, block_size=16)

Fingerprint = list[object]


class Disk:
    """Replaces fsync, and records its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[int, int] = {}
        self.names: dict[int, set[str]] = {}
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        status = os.fstat(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self.names[status.st_ino] = set(os.listdir(path))
        else:
            self.sizes[status.st_ino] = status.st_size

    def after_power_cut(self, root: Path, to: Path, chance: random.Random) -> Path:
        to.mkdir()
        durable = self.names.get(root.stat().st_ino, set())
        for path in sorted(root.iterdir()):
            if path.name not in durable and chance.random() < 0.5:
                continue
            if path.is_dir():
                self.after_power_cut(path, to / path.name, chance)
            else:
                size = path.stat().st_size
                kept = chance.randint(min(size, self.sizes.get(path.stat().st_ino, 0)), size)
                (to / path.name).write_bytes(path.read_bytes()[:kept])
                self.sizes[(to / path.name).stat().st_ino] = kept
        self.names[to.stat().st_ino] = set(os.listdir(to))
        return to


class Syncer:
    """The durable part of a syncer: it restarts from its directory, commits and takes snapshots."""

    def __init__(self, root: Path, faults: Callable[[str], None], log_type: type[RedoLog]) -> None:
        self.snapshots = SnapshotStore(root / "snapshot", faults=faults)
        self.log = log_type(root / "log", faults=faults)
        self.store = AnchorStore(PLAN, CONFIG)
        snapshot = self.snapshots.latest()
        if snapshot is None:
            start(self.store)
        else:
            self.store.restore(snapshot.state["anchors"], snapshot.tensors)
        for record in self.log.records(1 + (snapshot.lsn if snapshot else 0)):
            header = record.header
            self.store.commit(header["fragment"], record.payload, work=header["work"], version=header["version"])
        # Joining learners are told the restored state, so it counts as announced from here on.
        self.durable_commits = self.num_commits = sum(self.store.anchor(p).version for p in range(NUM_FRAGMENTS))

    def commit(self, num: int) -> None:
        """Make the next `num` commits, of different fragments, in one batch; then announce them."""
        states = []
        for k in range(self.num_commits, self.num_commits + num):
            p, gradient, amount = work(k)
            state = self.store.next_state(p, gradient, work=amount)
            header = {"fragment": p, "version": state.version, "work": amount}
            self.log.append(header, bytes_of(gradient))
            states.append((p, state))
        self.log.sync()
        for p, state in states:
            self.store.install(p, state)
        self.num_commits += num
        self.durable_commits = self.num_commits

    def snapshot(self) -> None:
        numbers, shards = self.store.freeze()
        lsn = self.log.last_lsn
        self.snapshots.write(lsn, {"anchors": numbers}, shards)
        self.log.rotate()
        self.log.drop_before(lsn + 1)


@cache
def work(k: int) -> tuple[int, torch.Tensor, float]:
    """Return fragment, outer gradient and work of the kth commit."""
    generator = torch.Generator().manual_seed(k)
    return k % NUM_FRAGMENTS, torch.randn(64, generator=generator).to(torch.bfloat16), (1 + k % 8) / 8


def start(store: AnchorStore) -> None:
    for p in range(NUM_FRAGMENTS):
        store.seed(p, torch.linspace(-1.0, 1.0 + p, store.layouts[p].padded_numel))


def fingerprint(store: AnchorStore) -> Fingerprint:
    return [
        (store.anchor(p).generation, store.anchor(p).version, name, bytes(bytes_of(tensor)))
        for p in range(NUM_FRAGMENTS)
        for name, tensor in store.anchor(p).tensors().items()
    ]


@cache
def reference() -> list[Fingerprint]:
    """Return the state after each number of commits, of an undisturbed syncer without a disk."""
    store = AnchorStore(PLAN, CONFIG)
    start(store)
    found = [fingerprint(store)]
    for k in range(NUM_COMMITS):
        p, gradient, amount = work(k)
        store.commit(p, gradient, work=amount)
        found.append(fingerprint(store))
    return found


def live(syncer: Syncer, chance: random.Random, patient: bool = False) -> None:
    """Make the remaining commits and some snapshots; if patient, repeat failed writes."""
    while syncer.num_commits < NUM_COMMITS:
        try:
            syncer.commit(min(chance.choice([1, 1, 2]), NUM_COMMITS - syncer.num_commits))
            if chance.random() < 0.4:
                syncer.snapshot()
        except StorageError:
            if not patient:
                raise


def die_and_restart(
    tmp_path: Path, disk: Disk, point: str, seed: int, *, power_cuts: float, log_type: type[RedoLog] = RedoLog
) -> int:
    """Crash up to four times at a point, restart each time and check the state; return the number of crashes.

    `power_cuts` is the share of crashes that lose data that was not fsynced; the others are like kill -9.
    """
    chance = random.Random(f"{point}/{seed}")
    root, promised, num_crashes = tmp_path / "life-0", 0, 0
    files.make_directory(root)
    for num_lives in range(1, 6):
        syncer = Syncer(root, Faults(point if num_lives < 5 else "", chance.randrange(6)), log_type)
        assert syncer.num_commits >= promised, f"{syncer.num_commits} commits came back of {promised} promised"
        assert fingerprint(syncer.store) == reference()[syncer.num_commits]
        try:
            live(syncer, chance)
            break
        except Crash:
            num_crashes += 1
        finally:
            promised = max(promised, syncer.durable_commits)
            kill(syncer.log)
        if chance.random() < power_cuts:
            root = disk.after_power_cut(root, tmp_path / f"life-{num_lives}", chance)
    assert fingerprint(syncer.store) == reference()[NUM_COMMITS]
    return num_crashes


@pytest.mark.seconds
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("power_cuts", [0.0, 0.7], ids=["killed", "power-cut"])
def test_crash_at_any_point_loses_no_announced_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, power_cuts: float
) -> None:
    disk = Disk(monkeypatch)
    crashes = [die_and_restart(tmp_path / str(seed), disk, point, seed, power_cuts=power_cuts) for seed in range(3)]
    assert max(crashes) > 0


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_many_crashes_at_any_point_lose_no_announced_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    disk = Disk(monkeypatch)
    for seed in range(100, 160):
        die_and_restart(tmp_path / str(seed), disk, point, seed, power_cuts=0.6)


class NeverSyncing(RedoLog):
    """Announces commits that are not durable."""

    def sync(self) -> int:
        self.durable_lsn = self.last_lsn
        return self.durable_lsn


def without_file_sync(path: Path, *pieces: Buffer) -> None:
    path.write_bytes(b"".join(pieces))


def without_directory_sync(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("omission", "error", "loss"),
    [
        ("log", AssertionError, "came back of"),
        ("snapshot files", CorruptLogError, "the snapshot is damaged"),
        ("snapshot directories", CorruptLogError, "is missing; the snapshot is damaged"),
    ],
)
def test_these_tests_fail_without_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omission: str, error: type[Exception], loss: str
) -> None:
    disk = Disk(monkeypatch)
    if omission == "snapshot files":
        monkeypatch.setattr(snapshots, "write_file", without_file_sync)
    elif omission == "snapshot directories":
        monkeypatch.setattr(snapshots, "sync_directory", without_directory_sync)

    def crash_often() -> None:
        log_type = NeverSyncing if omission == "log" else RedoLog
        for seed in range(40):
            die_and_restart(tmp_path / str(seed), disk, "append:before", seed, power_cuts=1.0, log_type=log_type)

    with pytest.raises(error, match=loss):
        crash_often()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_disk_error_at_any_point_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, code: int
) -> None:
    """The disk is full or fails for a moment. The syncer tries again and ends with the same bits."""
    disk = Disk(monkeypatch)
    chance = random.Random(point)
    root = tmp_path / "run"
    files.make_directory(root)
    syncer = Syncer(root, Faults(point, 1, OSError(code, os.strerror(code))), RedoLog)
    live(syncer, chance, patient=True)
    assert fingerprint(syncer.store) == reference()[NUM_COMMITS]
    kill(syncer.log)
    restarted = Syncer(disk.after_power_cut(root, tmp_path / "again", chance), Faults(), RedoLog)
    assert restarted.num_commits == NUM_COMMITS
    assert fingerprint(restarted.store) == reference()[NUM_COMMITS]
    restarted.log.close()
