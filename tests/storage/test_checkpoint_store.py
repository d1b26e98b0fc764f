"""Checkpoints are restored exactly, from a folder and from any other file system; damage is reported."""

from __future__ import annotations

import tempfile
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_diloco.errors import StorageError
from lightning_diloco.storage.checkpoint_file import Checkpoint
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.storage.tree import UnstorableError, pack, unpack

STATE = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4)}, 1: {"exp_avg": torch.empty(0)}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None, "name": "a.b"}],
    "milestones": Counter({5: 1, 9: 2}),
    "best": float("inf"),
    "bytes": torch.arange(5, dtype=torch.uint8),
}


def checkpoint(step: int = 7, learner: str = "l0", state: object = STATE) -> Checkpoint:
    return Checkpoint("run", learner, 2, "nonce", step, state)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "folder":
        return CheckpointStore(str(tmp_path / "checkpoints"))
    return CheckpointStore(f"memory://{tmp_path.name}/{request.node.name}")


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def test_a_checkpoint_is_restored_exactly(store: CheckpointStore) -> None:
    entry = store.write(checkpoint())
    (found,) = store.entries("l0")
    assert found == entry
    back = store.read(found)
    assert equal(back.state, STATE)
    assert isinstance(back.state["milestones"], Counter)
    assert (back.run, back.learner, back.incarnation, back.process, back.step) == ("run", "l0", 2, "nonce", 7)


def test_the_last_two_checkpoints_of_each_learner_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.write(checkpoint(step))
    store.write(checkpoint(1, "l1"))
    assert [entry.step for entry in store.entries("l0")] == [3, 2]
    assert store.learners() == ["l0", "l1"]


def test_the_newest_checkpoint_is_the_last_one_written_with_any_step(store: CheckpointStore) -> None:
    for step in (200, 100):  # the learner continued from an older one
        store.write(checkpoint(step))
    assert [entry.step for entry in store.entries("l0")] == [100, 200]


def test_an_empty_store_has_nothing(store: CheckpointStore) -> None:
    assert store.learners() == store.entries("l0") == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-9] + b"x" + data[-8:], lambda _: b""])
def test_a_damaged_checkpoint_is_refused(store: CheckpointStore, damage) -> None:
    entry = store.write(checkpoint())
    fs, root = fsspec.core.url_to_fs(store.url)
    path = f"{root}/l0/{entry.name}"
    fs.pipe_file(path, damage(fs.cat_file(path)))
    with pytest.raises(StorageError, match=r"has the digest .* it is not used"):
        store.read(entry)


def test_an_incomplete_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    (tmp_path / "l0").mkdir()
    (tmp_path / "l0" / "tmpabc.partial").write_bytes(b"half")
    assert store.entries("l0") == []


def test_incomplete_files_of_a_killed_process_are_removed_by_the_next_one(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where incomplete files for other file systems are written
    killed = [store._scratch("l0"), store._scratch("l0", "parts", "1"), store._scratch("l1")]  # never left again
    whole, part, of_another = (writing.__enter__() for writing in killed)

    store.write_part(0, checkpoint())
    store.write(checkpoint())
    assert (whole.exists(), part.exists(), of_another.exists()) == (False, True, True)
    store.write_part(1, checkpoint())
    assert (part.exists(), of_another.exists()) == (False, True)
    assert len(store.entries("l0")) == 1


def test_files_are_accessible_to_their_owner_only(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    entry = store.write(checkpoint())
    assert (tmp_path / "store" / "l0" / entry.name).stat().st_mode & 0o077 == 0
    assert [path.name for path in (tmp_path / "store" / "l0").iterdir()] == [entry.name]


def test_a_value_that_is_neither_plain_nor_a_tensor_is_refused_with_its_place(store: CheckpointStore) -> None:
    with pytest.raises(UnstorableError, match=r"\.optimizer\[1\]\.hook is a function"):
        store.write(checkpoint(state={"optimizer": [0, {"hook": lambda: None}]}))
    assert store.entries("l0") == []


def test_subclasses_are_restored_as_their_base_types() -> None:
    tensors: dict[str, torch.Tensor] = {}
    back = unpack(pack(OrderedDict(size=torch.Size([2, 3])), tensors), tensors)
    assert back == {"size": (2, 3)}
    assert type(back) is dict


@pytest.mark.parametrize("packed", [{"tensor": "x"}, {"dict": 3}, {"code": []}, {"dict": [3]}])
def test_values_that_pack_does_not_write_are_refused(packed) -> None:
    with pytest.raises((KeyError, ValueError)):
        unpack(packed, {})


def of_ranks(store: CheckpointStore, step: int) -> Checkpoint:
    """Write the parts of two ranks, then the checkpoint that names them."""
    parts = tuple(store.write_part(r, checkpoint(step, state={**STATE, "rank": r})) for r in range(2))
    whole = replace(checkpoint(step, state={}), layout="2 ranks", parts=parts)
    store.write(whole)
    return whole


def test_the_parts_of_ranks_are_restored_exactly(store: CheckpointStore) -> None:
    whole = of_ranks(store, 7)
    (entry,) = store.entries("l0")
    assert store.read(entry) == whole
    for rank, digest in enumerate(whole.parts):
        assert equal(store.read_part("l0", rank, digest).state, {**STATE, "rank": rank})
    with pytest.raises(StorageError, match="could not read"):
        store.read_part("l0", 1, whole.parts[0])


def test_parts_that_no_checkpoint_names_are_removed(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        whole = of_ranks(store, step)
    left_alone = store.write_part(3, checkpoint(9))  # of a larger learner that died before it completed its checkpoint
    named = store.parts_named("l0")
    assert len(named) == 4
    assert named >= set(whole.parts)
    fs, root = fsspec.core.url_to_fs(store.url)

    def names() -> set[str]:
        return {path.rpartition("/")[2] for path in fs.ls(f"{root}/l0/parts", detail=False)}

    assert len(names()) == 7
    store.remove_parts("l0", (0, 2), named)
    assert f"3-{left_alone}.safetensors" in names()
    store.remove_parts("l0", (1, 2), named)
    assert {name[2:].partition(".")[0] for name in names()} == named


def test_a_copy_includes_the_parts(store: CheckpointStore, tmp_path: Path) -> None:
    whole, copies = of_ranks(store, 7), CheckpointStore(str(tmp_path / "copies"))
    copies.copy(store, *store.entries("l0"))
    (entry,) = copies.entries("l0")
    assert copies.read(entry) == whole
    assert equal(copies.read_part("l0", 1, whole.parts[1]).state, {**STATE, "rank": 1})
