"""Two ranks of a learner upload together: each sends its part, and rank 0 sends all parts if rank 1 fails."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_diloco.errors import TransportError
from lightning_diloco.learner.ranks import partial_uploads
from lightning_diloco.learner.ranks.partial_uploads import PartedConnection, PartSender
from lightning_diloco.protocol.learner import fragment
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json
from tests.learner.fleet import JOIN, Fleet, Learner, Wire, until


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make learners ask for fates again after a short time."""
    monkeypatch.setattr(fragment, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(partial_uploads, "ALONE_S", 0.1)
    monkeypatch.setattr(partial_uploads, "PART_S", 0.05)


class Queues:
    """A `Channel` between two threads."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self._orders, self._answers = queue.SimpleQueue[Json](), queue.SimpleQueue[bool]()

    def give(self, order: Json, meanwhile: Callable[[], object], *, within_s: float = -1.0) -> bool:
        self._orders.put(order)
        try:
            meanwhile()
        finally:
            could = self._answers.get()
        return could

    def hear(self) -> tuple[Json, Tensor]:
        return self._orders.get(), torch.empty(0)

    def all_could(self, mine: bool) -> bool:
        self._answers.put(mine)
        return mine


class CountingWire(Wire):
    """A connection that counts the bytes of contributions."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.connect())
        self.sizes = Counter[int]()
        self.moves: list[str] = []
        self.moved_to: str | None = None
        self.shards: tuple[str, ...] = ()

    def move_to(self, syncer: str) -> None:
        self.moves.append(syncer)

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        answer = super().put(bulk, deadline_s=deadline_s)
        if bulk.header["what"] == "contribution":
            self.sizes[bulk.header.get("part", -1)] += bulk.payload.nbytes
        return answer


class Ranks:
    """A learner with a second rank in a thread, which encodes the same as rank 0."""

    def __init__(self, fleet: Fleet) -> None:
        orders = Queues()
        self.learner, self.other = fleet.learner("l0"), CountingWire(fleet)
        self.learner.wire = self.own = CountingWire(fleet)
        self.connection = PartedConnection(self.own, orders)
        self.sender = PartSender(orders, lambda address: self.other)
        self.learner.link._connect = lambda address: self.connection
        self.encoded: Callable[[Any], Any] = lambda payload: payload
        self._thread = threading.Thread(target=self.sender.run, daemon=True)

    def go(self) -> Learner:
        assert self.sender.reach(lambda: JoinAddress.parse(JOIN))
        self._thread.start()
        join = self.learner.join

        def joined() -> Learner:
            join()
            link = self.learner.link
            self.connection.prepare(link.plan, link.config, range(link.plan.num_fragments))
            encode = link.device.encode

            def both(snapshot: Any) -> Any:
                found, p = encode(snapshot), snapshot.fragment
                numel = link.plan.layout(p, link.config.block_size).padded_numel
                self.sender.keep(p, self.encoded(found.payload), numel, link.config)
                return found

            link.device.encode = both  # type: ignore[method-assign]
            return self.learner

        self.learner.join = joined  # type: ignore[method-assign]
        return self.learner.go()

    def end(self) -> None:
        self.connection.end()
        self._thread.join(10.0)
        assert not self._thread.is_alive()


@contextmanager
def ranks(tmp_path: Path) -> Iterator[tuple[Fleet, Ranks]]:
    with Fleet(tmp_path) as fleet:
        yield fleet, (both := Ranks(fleet))
        both.learner.enough().done()
        both.end()
        summary = fleet.stop()
    assert summary["ledger_exact"]
    assert summary["tokens_merged"] == summary["tokens_seen"] > 0


@pytest.mark.seconds
def test_each_rank_uploads_half_of_each_contribution(tmp_path: Path) -> None:
    with ranks(tmp_path) as (fleet, both):
        both.go()
        fleet.until_commits(6)
    assert both.own.sizes.keys() == {0}
    assert both.other.sizes.keys() == {1}
    assert both.own.sizes[0] == pytest.approx(both.other.sizes[1], rel=0.15)  # whole blocks, of few


@pytest.mark.seconds
def test_a_rank_whose_connection_is_cut_does_not_cut_off_its_learner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(tmp_path) as (fleet, both):
        both.go()
        fleet.until_commits(3)
        both.other.is_cut = True
        fleet.until_commits(3)
        assert both.own.sizes[-1] > 0
        assert "rank 0 uploads all of them" in caplog.text
        both.other.is_cut, before = False, both.other.sizes[1]
        until(lambda: both.other.sizes[1] > before, "its parts again")
    assert "token" not in caplog.text.replace("tokens", "")


@pytest.mark.seconds
def test_an_upload_that_rank_0_loses_is_repeated(tmp_path: Path) -> None:
    with ranks(tmp_path) as (fleet, both):
        failing = iter([True, True, False, True])

        def fail() -> None:
            if next(failing, False):
                raise TransportError("put: lost")

        both.go()
        fleet.until_commits(2)
        both.own.before["put"] = fail
        fleet.until_commits(6)
        assert next(failing, None) is None


def test_a_contribution_that_the_syncer_has_lost_is_uploaded_by_rank_0(tmp_path: Path) -> None:
    """The other rank no longer has its part, so an order to upload it would wait for PART_S."""
    with ranks(tmp_path) as (fleet, both):
        put = both.connection.put

        def twice(bulk: Bulk, *, deadline_s: float) -> Json:
            put(bulk, deadline_s=deadline_s)
            return put(bulk, deadline_s=deadline_s)

        both.connection.put = twice  # type: ignore[method-assign]
        both.go()
        fleet.until_commits(6)
    assert both.own.sizes.keys() == {0, -1}
    assert both.own.sizes[-1] == pytest.approx(both.own.sizes[0] + both.other.sizes[1], rel=0.05)


@pytest.mark.seconds
def test_a_rank_that_encoded_other_values_sends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ranks(tmp_path) as (fleet, both):
        both.encoded = lambda payload: payload ^ 1
        both.go()
        fleet.until_commits(3)
    assert not both.other.sizes
    assert both.own.sizes[-1] > 0
    assert "ranks must hold equal parameters" in caplog.text


@pytest.mark.seconds
def test_the_other_ranks_dial_the_syncer_that_rank_0_has_moved_to(tmp_path: Path) -> None:
    with ranks(tmp_path) as (fleet, both):
        both.go()
        fleet.until_commits(3)
        assert both.other.moves == []
        both.own.moved_to = "10.0.0.2:2"
        fleet.until_commits(3)
        assert set(both.other.moves) == {"10.0.0.2:2"}
