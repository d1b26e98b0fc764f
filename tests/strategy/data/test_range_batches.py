"""Batches cut from leased ranges: in order, across borders, each counted when it was trained."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from lightning_diloco.errors import JoinError
from lightning_diloco.learner import lease_client
from lightning_diloco.learner.lease_client import LeaseClient
from lightning_diloco.protocol.data_ranges import Catalogue, Lease, Piece
from lightning_diloco.protocol.learner.leases import LeaseHolder
from lightning_diloco.protocol.messages import Leases
from lightning_diloco.strategy.data import range_batches as ranges_module
from lightning_diloco.strategy.data.local_order import OwnOrder
from lightning_diloco.strategy.data.range_batches import RangeBatches, RangeLoader, SizedRangeLoader
from lightning_diloco.strategy.data.unleased import Unleased

RANGE_SIZE = 4


class Numbers:
    """Sources of this number of values; source s begins with 100 s."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.catalogue = Catalogue("numbers", len(sizes), None)

    def read(self, lease: Lease) -> tuple[torch.Tensor, bool]:
        numbers = torch.arange(self.sizes[lease.source])[lease.index * RANGE_SIZE :][:RANGE_SIZE]
        return (100 * lease.source + numbers)[lease.skip :], len(numbers) < RANGE_SIZE


class Desk(LeaseClient):
    """The real desk, on leases that the test grants."""

    def __init__(self, *leases: Lease) -> None:
        self.lessee, self.is_online, self.num_asked = LeaseHolder(drops=False), False, 0
        self.waits: list[float] = []
        options = {"ask": self._count, "is_online": lambda: self.is_online, "waited": self.waits.append}
        super().__init__(self.lessee, threading.Condition(), Catalogue("numbers", 1, None), lambda: None, **options)
        self.grant(*leases)

    def _count(self) -> None:
        self.num_asked += 1

    def grant(self, *leases: Lease) -> None:
        self.lessee.hear(Leases(leases))


def leases(*indices: int, first: int = 1) -> list[Lease]:
    return [Lease(first + i, 0, 0, index) for i, index in enumerate(indices)]


@pytest.fixture
def made() -> Iterator[list[RangeLoader]]:
    loaders: list[RangeLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()


def loader_of(made: list[RangeLoader], ranges: Numbers, desk: Desk | OwnOrder, batch_size: int = 3) -> RangeLoader:
    made.append(RangeLoader(RangeBatches(ranges, desk, batch_size=batch_size), collate=torch.Tensor.tolist))
    return made[-1]


def test_batches_cross_the_borders_of_ranges_and_have_a_piece_for_each(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0, 2, 1))
    loader = loader_of(made, Numbers(12), desk)
    assert list(islice(loader, 4)) == [[0, 1, 2], [3, 8, 9], [10, 11, 4], [5, 6, 7]]
    for _ in range(2):
        loader.trained(30)
    assert desk.collect() == (Piece(1, 3, 30), Piece(1, 1, 10, is_whole=True), Piece(2, 2, 20))
    assert desk.collect() == ()


def test_a_batch_that_was_handed_out_but_not_trained_comes_again(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0, 1, 2))
    loader = loader_of(made, Numbers(12), desk)
    assert list(islice(loader, 3)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    loader.trained(3)
    loader.tried()
    assert list(islice(loader, 2)) == [[6, 7, 8], [3, 4, 5]]
    assert sum(piece.samples for piece in desk.collect()) == 3


def test_a_range_whose_lease_is_gone_is_not_read_further(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0, 1, 2))
    loader = loader_of(made, Numbers(12), desk, batch_size=2)
    assert next(iter(loader)) == [0, 1]
    desk.lessee.hear(Leases((), gone=(1,)))
    loader.trained(2)
    assert next(iter(loader)) == [4, 5]


def test_the_end_of_a_source_is_reported_at_once_and_ranges_beyond_it_are_empty(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0, 1, 2, 3), Lease(5, 1, 0, 0))
    loader = loader_of(made, Numbers(6), desk)
    assert list(islice(loader, 3)) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    ended = {span.number for span in desk.lessee.begun if span.is_last}
    assert ended == {2, 3, 4}
    assert next(iter([lease for lease in [desk.take()] if lease]), None) is None


def test_without_leases_a_learner_reads_unread_data_and_these_tokens_are_counted(
    made: list[RangeLoader], caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(*leases(0, 1))
    loader = loader_of(made, Numbers(20), desk, batch_size=4)
    batches, seen = iter(loader), []
    for _ in range(4):
        seen.append(next(batches))
        loader.trained(4)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert "reads data of this epoch that it has not read" in caplog.text
    assert [piece.number for piece in desk.collect()] == [1, 2, None, None]
    desk.grant(*leases(2, first=3))
    assert [8, 9, 10, 11] in list(islice(loader, 2)), "leased now, it is trained on for the run's books"


@pytest.mark.parametrize("num_ranges", [None, 6], ids=["a stream", "a data set"])
def test_a_long_outage_reads_the_data_epoch_by_epoch(made: list[RangeLoader], num_ranges: int | None) -> None:
    numbers, desk = Numbers(24, 24), Desk(*leases(0, 1))
    numbers.catalogue = Catalogue("numbers", 2, num_ranges)
    loader = loader_of(made, numbers, desk, batch_size=4)
    seen: Counter[int] = Counter()
    for _, batch in zip(range(3 * 12), loader, strict=False):
        loader.trained(4)
        seen.update(batch)
        assert max(seen.values()) - min(seen[n] for n in [*range(24), *range(100, 124)]) <= 1
    assert set(seen.values()) == {3}


def test_learners_that_are_cut_off_together_read_different_data() -> None:
    catalogue = Catalogue("numbers", 2, 500)
    orders = [Unleased(catalogue, seed) for seed in range(3)]
    chosen = [{(it.source, it.index) for it in (order.next() for _ in range(50))} for order in orders]
    assert len(set.union(*chosen)) > 120
    assert [len(each) for each in chosen] == [50] * 3


def test_the_wait_for_the_first_range_is_limited(made: list[RangeLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_client, "FIRST_S", 0.01)
    with pytest.raises(JoinError, match="leased no data"):
        next(iter(loader_of(made, Numbers(12), Desk())))


def test_a_first_batch_larger_than_the_first_leases_waits_for_more(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0, 1))
    others = threading.Thread(target=grant_when_awaited, args=(desk, leases(2, first=3)))
    others.start()
    assert next(iter(loader_of(made, Numbers(12), desk, batch_size=12))) == [*range(12)]
    others.join()
    (asked,) = desk.lessee.ask(0.0, 0, 1.0, wants=True)
    assert asked.wanted == 6, "two batches of three ranges each"


def grant_when_awaited(desk: Desk, more: list[Lease]) -> None:
    """Grant leases to a reader that has used up its leases and waits."""
    until_s = time.monotonic() + 60.0
    while not desk._changed._waiters and time.monotonic() < until_s:  # type: ignore[attr-defined]
        time.sleep(0.001)
    with desk._changed:
        desk.grant(*more)
        desk._changed.notify_all()


def test_missing_leases_delay_only_the_start(made: list[RangeLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_module, "START_S", 0.01)
    desk = Desk(*leases(0))
    loader = loader_of(made, Numbers(12), desk, batch_size=6)
    assert next(iter(loader)) == [0, 1, 2, 3, 4, 5]
    loader.trained(6)
    assert [(piece.number, piece.samples) for piece in desk.collect()] == [(1, 4), (None, 2)]


def started(made: list[RangeLoader], desk: Desk) -> Iterator[list[int]]:
    """Return a learner that has trained on all of its leases."""
    batches = iter(loader := loader_of(made, Numbers(40), desk, batch_size=4))
    assert next(batches) == [0, 1, 2, 3]
    loader.trained(4)
    return batches


def test_a_learner_without_leases_requests_them_at_once_and_waits(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0))
    desk.is_online = True
    batches, num_asked = started(made, desk), desk.num_asked
    others = threading.Thread(target=grant_when_awaited, args=(desk, leases(5, first=3)))
    others.start()
    assert next(batches) == [20, 21, 22, 23]
    others.join()
    assert desk.num_asked > num_asked


def test_a_learner_does_not_wait_for_a_syncer_without_leases(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0))
    desk.is_online = True
    batches = started(made, desk)
    assert desk.lessee.ask(0.0, 0, 1.0, wants=True)[0].wanted
    desk.grant()
    began_s = time.monotonic()
    assert next(batches) == [4, 5, 6, 7]
    assert time.monotonic() - began_s < ranges_module.ANSWER_S


def test_a_learner_waits_once_for_a_silent_syncer(made: list[RangeLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_module, "ANSWER_S", 0.01)
    desk = Desk(*leases(0))
    desk.is_online = True
    batches = started(made, desk)
    assert next(batches) == [4, 5, 6, 7]
    monkeypatch.setattr(ranges_module, "ANSWER_S", 600.0)
    assert next(batches) == [8, 9, 10, 11]
    desk.grant(*leases(5, first=3))
    assert next(batches) == [20, 21, 22, 23]
    others = threading.Thread(target=grant_when_awaited, args=(desk, leases(7, first=4)))
    others.start()
    assert next(batches) == [28, 29, 30, 31], "it waits again"
    others.join()
    assert len(desk.waits) >= 2, "the link counts them as stall"
    assert desk.waits[0] >= 0.01


def test_a_learner_does_not_wait_for_an_unreachable_syncer(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0))
    desk.is_online = True
    batches = started(made, desk)
    goes = threading.Timer(0.05, setattr, (desk, "is_online", False))
    goes.start()
    assert next(batches) == [4, 5, 6, 7]
    goes.join()


def test_a_read_error_is_raised_in_the_training_thread(made: list[RangeLoader]) -> None:
    ranges = Numbers(12)
    ranges.read = lambda lease: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        next(iter(loader_of(made, ranges, Desk(*leases(0)))))


def test_an_iteration_of_known_length_ends_and_the_next_one_continues(made: list[RangeLoader]) -> None:
    desk = Desk(*leases(0, 1, 2))
    batches = RangeBatches(Numbers(12), desk, batch_size=2)
    loader = SizedRangeLoader(batches, num_batches=2, collate=torch.Tensor.tolist)
    made.append(loader)
    assert len(loader) == 2
    seen = []
    for _ in range(2):
        for batch in loader:
            loader.trained(2)
            seen.append(batch)
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_own_order_reads_every_source_to_its_end_and_again(made: list[RangeLoader]) -> None:
    order = OwnOrder(2)
    loader = loader_of(made, Numbers(6, 3), order, batch_size=3)
    assert list(islice(loader, 4)) == [[0, 1, 2], [3, 4, 5], [100, 101, 102], [0, 1, 2]]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_an_own_order_are_disjoint_complete_and_none_is_without_data(parts: int) -> None:
    num_ranges = (4, 1, 1)
    read: dict[int, list[tuple[int, int, int]]] = {part: [] for part in range(parts)}
    for part in range(parts):
        order = OwnOrder(3, part=part, parts=parts)
        while (lease := order.take()).epoch < 3:
            if lease.index < num_ranges[lease.source]:
                read[part].append((lease.epoch, lease.source, lease.index))
            if lease.index >= num_ranges[lease.source] - 1:
                order.ended(lease)
    everything = [(epoch, source, k) for epoch in range(3) for source in range(3) for k in range(num_ranges[source])]
    assert sorted(where for part in read.values() for where in part) == everything
    single = {part: {source for _, source, _ in read[part] if source > 0} for part in range(parts)}
    assert all(single.values()), "a source of one range goes to each of the readers in turn"


@pytest.mark.parametrize("num_trained", range(1, 9))
def test_an_own_order_continues_at_its_position(made: list[RangeLoader], num_trained: int) -> None:
    ranges, order = Numbers(6, 3), OwnOrder(2)
    everything = list(islice(loader_of(made, ranges, OwnOrder(2), batch_size=2), 12))
    loader = loader_of(made, ranges, order, batch_size=2)
    batches = iter(loader)
    assert [next(batches) for _ in range(num_trained + 1)] == everything[: num_trained + 1]
    for _ in range(num_trained):
        loader.trained(0)
    again = loader_of(made, ranges, OwnOrder(2, position=order.position), batch_size=2)
    assert list(islice(again, 3)) == everything[num_trained : num_trained + 3]
