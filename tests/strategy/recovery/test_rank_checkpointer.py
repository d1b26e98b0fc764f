"""Checkpoints of several ranks: all parts or none, and all ranks continue from the same checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_diloco.storage.checkpoint_file import Checkpoint
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.strategy.recovery import trainer_state
from lightning_diloco.strategy.recovery.checkpointer import Found, Owner
from lightning_diloco.strategy.recovery.rank_checkpointer import RanksCheckpointer, layout_of

WITHIN_S = 10.0
WHOLE = layout_of(2, None)


class Table:
    """The rendezvous of a learner's ranks, which are threads instead of processes."""

    def __init__(self, size: int) -> None:
        self.size, self._all = size, threading.Barrier(size, timeout=WITHIN_S)
        self._values: list[Any] = [None] * size

    def share(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._all.wait()
        found = list(self._values)
        self._all.wait()
        return found


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "store"))


@pytest.fixture
def learner(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RanksCheckpointer]]:
    """Makes all ranks of a learner, in a process that has written nothing before."""
    monkeypatch.setattr(trainer_state, "objection", lambda trainer, state, is_own: state.get("objection"))

    def make(
        name: str = "l0", size: int = 2, layout: str = WHOLE, store: CheckpointStore = store
    ) -> list[RanksCheckpointer]:
        table = Table(size)
        return [
            RanksCheckpointer(
                SimpleNamespace(),
                Owner("run", name, 1),
                store,
                every_steps=10,
                layout=layout,
                ranks=SimpleNamespace(rank=rank, size=size, share=lambda value, rank=rank: table.share(rank, value)),
            )
            for rank in range(size)
        ]

    return make


def all_ranks(do: Callable[[Any], Any], ranks: list[RanksCheckpointer]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(do, ranks))


def write(ranks: list[RanksCheckpointer], step: int, **odd: object) -> None:
    """Write the part of each rank; the state of the last rank may be unusual."""

    def part(rank: RanksCheckpointer) -> None:
        number = rank._ranks.rank
        state = {"rank": number, "moments": torch.full((3,), float(step + number))}
        state |= odd if number == rank._ranks.size - 1 else {}
        owner, written = rank._owner, threading.Event()
        rank._write(Checkpoint(owner.run, owner.learner, 1, "before", step, state, None, rank._layout), written)
        assert written.is_set()

    all_ranks(part, ranks)


def found(ranks: list[RanksCheckpointer]) -> list[tuple[str, int, int] | None]:
    """Return the learner, the step and the rank of the part that each rank uses."""

    def told(it: Found | None) -> tuple[str, int, int] | None:
        return None if it is None else (it.learner, it.step, it.state["rank"])

    return [told(it) for it in all_ranks(lambda rank: rank._find(), ranks)]


def both(step: int, learner: str = "l0") -> list[tuple[str, int, int]]:
    """Return the result for two ranks that use their parts of the same checkpoint."""
    return [(learner, step, 0), (learner, step, 1)]


def part_file(store: CheckpointStore, rank: int, of: int = 0) -> Path:
    whole = store.read(store.entries("l0")[of])
    return Path(store.url, "l0", "parts", f"{rank}-{whole.parts[rank]}.safetensors")


def test_each_rank_continues_from_its_part_of_the_newest_checkpoint(store, learner):
    ranks = learner()
    for step in (10, 20, 30):
        write(ranks, step)
        assert all(rank.wait(0) for rank in ranks)
    assert [entry.step for entry in store.entries("l0")] == [30, 20]
    assert found(learner()) == both(30)
    assert len(list(Path(store.url, "l0", "parts").iterdir())) == 4, "parts that nothing names are gone"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_a_torn_part_makes_all_ranks_use_the_previous_checkpoint(store, learner, caplog, rank, damage):
    for step in (10, 20):
        write(learner(), step)
    damage(part_file(store, rank))
    assert found(learner()) == both(10)
    assert part_file(store, rank).name in caplog.text


def test_a_part_that_one_rank_refuses_is_used_by_no_rank(store, learner, caplog):
    write(learner(), 10)
    write(learner(), 20, objection="it has another optimizer")
    assert found(learner()) == both(10)
    assert "step 20 of l0 does not fit: it has another optimizer" in caplog.text


def test_parts_that_no_checkpoint_names_are_not_used(store, learner, caplog):
    ranks = learner()
    write(ranks, 10)
    write(ranks, 20, hook=lambda: None)
    assert not any(rank.wait(0) for rank in ranks)
    assert "no checkpoint was written, training goes on: .hook is a function" in caplog.text
    assert found(learner()) == both(10)


def test_a_store_that_fails_for_one_rank_causes_a_warning_and_training_continues(store, learner, tmp_path, caplog):
    ranks = learner()
    (tmp_path / "file").write_text("no folder")
    ranks[1]._store = CheckpointStore(str(tmp_path / "file"))
    write(ranks, 10)
    assert "no checkpoint was written, training goes on: [Errno 20]" in caplog.text
    assert store.entries("l0") == []


@pytest.mark.parametrize(
    "other",
    [{"size": 3, "layout": layout_of(3, None)}, {"layout": layout_of(2, [{"a": ((0,), (2,))}, {"a": ((2,), (2,))}])}],
)
def test_another_layout_is_refused_with_a_warning(store, learner, caplog, other):
    write(learner(), 10)
    assert found(learner(**other)) == [None] * other.get("size", 2)
    assert f"step 10 of l0 does not fit: it is of {WHOLE}, this learner has {other['layout']}" in caplog.text


def test_a_peers_checkpoint_of_the_same_layout_is_used_after_own_ones(learner):
    write(learner("peer"), 20)
    assert found(learner()) == both(20, "peer")
    write(learner(), 10)
    assert found(learner()) == both(10)


def test_a_lost_rank_leaves_no_checkpoint_and_no_hanging_thread(store, learner):
    rank, _ = learner()

    def gone(value: object) -> list[object]:
        raise RuntimeError("Connection closed by peer")

    rank._ranks.share = gone
    write([rank], 10)
    assert not rank.wait(0)
    assert store.entries("l0") == []


def test_layouts_are_equal_if_each_rank_holds_the_same():
    def boxes(rows: int) -> list[dict[str, Any]]:
        return [{"a": ((0, 0), (rows, 4))}, {"a": ((rows, 0), (6 - rows, 4))}]

    assert layout_of(2, boxes(3)) == layout_of(2, boxes(3)) != layout_of(2, boxes(2))
    assert layout_of(2, None) != layout_of(4, None)
