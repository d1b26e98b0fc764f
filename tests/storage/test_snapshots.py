"""Snapshots: complete under their name, verified before use, and only one is kept."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage import snapshots
from lightning_diloco.storage.snapshots import Snapshot, SnapshotStore
from tests.storage import faults
from tests.storage.faults import Crash, Faults

POINTS = [point for point in faults.POINTS if point.startswith("snapshot:")]


def tensors(seed: int) -> list[tuple[str, dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"fragment-{p:04d}", {"master": torch.randn(32, generator=generator), "chain": torch.arange(p).byte()})
        for p in range(3)
    ]


def is_that_of(snapshot: Snapshot | None, seed: int) -> bool:
    assert snapshot is not None
    wanted = tensors(seed)
    assert list(snapshot.tensors) == [stem for stem, _ in wanted]
    return snapshot.state == {"seed": seed} and all(
        torch.equal(snapshot.tensors[stem][name], tensor)
        for stem, by_name in wanted
        for name, tensor in by_name.items()
    )


def test_latest_is_none_before_the_first(tmp_path: Path) -> None:
    assert SnapshotStore(tmp_path / "none").latest() is None


def test_state_and_tensors_are_restored_and_the_old_snapshot_is_removed(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshot")
    store.write(7, {"seed": 1}, tensors(1))
    store.write(9, {"seed": 2}, tensors(2))
    latest = SnapshotStore(tmp_path / "snapshot").latest()
    assert is_that_of(latest, 2)
    assert latest is not None
    assert (latest.lsn, len(latest.tensors)) == (9, 3)
    assert [path.name for path in (tmp_path / "snapshot").iterdir()] == [f"{9:020d}"]
    with pytest.raises(KeyError):
        latest.tensors["fragment-9999"]


def test_same_lsn_is_written_once(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.write(7, {"seed": 1}, tensors(1))
    store.write(7, {"seed": 2}, tensors(2))
    assert is_that_of(store.latest(), 1)


def test_an_old_snapshot_that_could_not_be_removed_is_removed_by_the_next_try(tmp_path: Path) -> None:
    """The log is cut after the next try, so an older snapshot would have none."""
    broken = Faults("snapshot:after_rename", skip=1, error=OSError(errno.EIO, "Input/output error"))
    store = SnapshotStore(tmp_path, faults=broken)
    store.write(7, {"seed": 1}, tensors(1))
    with pytest.raises(StorageError):
        store.write(9, {"seed": 2}, tensors(2))
    assert store.lsns() == [7, 9]
    store.write(9, {"seed": 2}, tensors(2))
    assert store.lsns() == [9]


def test_files_are_private_and_have_a_checksum_file(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.write(1, {"seed": 1}, tensors(1))
    folder = tmp_path / f"{1:020d}"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if b2sum := shutil.which("b2sum"):
        subprocess.run([b2sum, "--check", "--quiet", "--strict", "B2SUMS"], cwd=folder, check=True)


@pytest.mark.parametrize("point", POINTS)
def test_crash_while_writing_leaves_the_old_or_the_new_snapshot(tmp_path: Path, point: str) -> None:
    SnapshotStore(tmp_path).write(7, {"seed": 1}, tensors(1))
    crash = Faults(point, skip=1 if point == "snapshot:after_file" else 0)
    with pytest.raises(Crash):
        SnapshotStore(tmp_path, faults=crash).write(9, {"seed": 2}, tensors(2))
    store = SnapshotStore(tmp_path)
    assert is_that_of(store.latest(), 2 if point in ("snapshot:after_rename", "snapshot:after_remove") else 1)
    assert not list(tmp_path.glob("*.partial"))
    store.write(11, {"seed": 3}, tensors(3))
    assert is_that_of(store.latest(), 3)
    assert len(list(tmp_path.iterdir())) == 1


def test_old_snapshot_is_removed_only_after_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, the folder and its parent are fsynced, in that order, before anything is removed."""
    store = SnapshotStore(tmp_path)
    store.write(7, {"seed": 1}, tensors(1))
    done: list[str] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def traced_fsync(fd: int) -> None:
        done.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def traced_rename(path: Path, to: Path) -> Path:
        done.append("rename")
        return rename(path, to)

    def traced_rmtree(path: Path) -> None:
        if path.exists():
            done.append("remove " + path.name)
        rmtree(path)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    monkeypatch.setattr(shutil, "rmtree", traced_rmtree)
    store.write(9, {"seed": 2}, tensors(2))
    old, new, root = f"{7:020d}", f"{9:020d}", tmp_path.name
    files = [f"tensors-{stem}.safetensors" for stem, _ in tensors(2)] + ["state.json", "B2SUMS", f"{new}.partial"]
    removal = ["rename", f"remove {old}.partial", f"fsync {root}"]
    assert done == [f"fsync {name}" for name in files] + ["rename", f"fsync {root}", *removal]


@pytest.mark.parametrize("name", ["state.json", "tensors-fragment-0001.safetensors", "B2SUMS"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_named(tmp_path: Path, name: str, damage: str) -> None:
    store = SnapshotStore(tmp_path)
    store.write(7, {"seed": 1}, tensors(1))
    path = tmp_path / f"{7:020d}" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    with pytest.raises(CorruptLogError, match=r"safetensors|state.json|B2SUMS") as caught:
        is_that_of(store.latest(), 1)
    assert "the snapshot is damaged; restore its directory from a backup" in str(caught.value)


def test_crash_while_removing_the_old_snapshot_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(tmp_path)
    store.write(1, {"seed": 1}, tensors(1))

    def remove_one_file(path: Path) -> None:
        if path.exists():
            next(path.glob("tensors-*")).unlink()
            raise Crash

    monkeypatch.setattr(snapshots, "remove_tree", remove_one_file)
    with pytest.raises(Crash):
        store.write(2, {"seed": 2}, tensors(2))
    monkeypatch.undo()
    again = SnapshotStore(tmp_path)
    assert again.lsns() == [2]
    assert is_that_of(again.oldest(), 2)
    assert [path.name for path in tmp_path.iterdir()] == [again.path(2).name]


def test_full_disk_keeps_the_old_snapshot(tmp_path: Path) -> None:
    def faults(point: str) -> None:
        if point == "snapshot:after_file":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    SnapshotStore(tmp_path).write(7, {"seed": 1}, tensors(1))
    with pytest.raises(StorageError, match=r"could not write the snapshot .*No space left"):
        SnapshotStore(tmp_path, faults=faults).write(9, {"seed": 2}, tensors(2))
    assert is_that_of(SnapshotStore(tmp_path).latest(), 1)


def test_snapshot_is_written_again_after_space_is_freed(tmp_path: Path) -> None:
    errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def faults(point: str) -> None:
        if point == "snapshot:before_rename" and errors:
            raise errors.pop()

    store = SnapshotStore(tmp_path, faults=faults)
    with pytest.raises(StorageError):
        store.write(9, {"seed": 1}, tensors(1))
    store.write(9, {"seed": 2}, tensors(2))
    assert is_that_of(store.latest(), 2)


def test_tensors_are_taken_one_by_one(tmp_path: Path) -> None:
    """A fragment may need all free memory, so each one is requested after the previous one is on disk."""
    folder = tmp_path / f"{1:020d}.partial"

    def one_by_one() -> object:
        for p, shard in enumerate(tensors(1)):
            assert len(list(folder.iterdir())) == p
            yield shard

    SnapshotStore(tmp_path).write(1, {"seed": 1}, one_by_one())
    assert is_that_of(SnapshotStore(tmp_path).latest(), 1)
