"""Leased ranges dealt to the ranks of a learner: disjoint, complete, with equal numbers of batches, counted once."""

from __future__ import annotations

import queue
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_diloco.learner.ranks.scatter_batches import BatchScatter, deal
from lightning_diloco.protocol.data_ranges import Piece, divided
from lightning_diloco.protocol.messages import Leases
from lightning_diloco.strategy.data.range_batches import RangeBatches, RangeLoader
from lightning_diloco.strategy.data.rank_batches import RankBatches
from tests.strategy.data.test_range_batches import RANGE_SIZE, Desk, Numbers, leases


class Table(BatchScatter):
    """A scatter between threads instead of processes."""

    def __init__(self, size: int) -> None:
        self.num_shares, self.queues = size, [queue.SimpleQueue[torch.Tensor]() for _ in range(size)]

    def give(self, rows: torch.Tensor) -> torch.Tensor:
        own, *others = deal(rows, self.num_shares)
        for waiting, part in zip(self.queues[1:], others, strict=True):
            waiting.put(part)
        return own

    def of(self, rank: int) -> Table:
        """Return this rank's end."""
        seen = Table(self.num_shares)
        seen.take = lambda: self.queues[rank].get(timeout=60.0)  # type: ignore[method-assign]
        return seen


class Learner:
    """The loaders of all ranks of a learner."""

    def __init__(self, ranges: Numbers, desk: Desk, *, size: int, batch_size: int) -> None:
        table = Table(size)
        self._leader = RankBatches(RangeBatches(ranges, desk, batch_size=size * batch_size), table)
        others = [RankBatches(None, table.of(rank)) for rank in range(1, size)]
        self.loaders = [RangeLoader(each, collate=torch.Tensor.tolist) for each in (self._leader, *others)]
        self.batches = [iter(loader) for loader in self.loaders]

    def step(self) -> list[list[int]]:
        """Train on a batch on each rank."""
        now = [next(batches) for batches in self.batches]
        for loader, rows in zip(self.loaders, now, strict=True):
            loader.trained(len(rows))
        return now

    def close(self) -> None:
        self._leader.close()


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    num_ranges=st.integers(1, 9),
    tail=st.integers(1, RANGE_SIZE),
    data=st.data(),
)
def test_ranks_divide_the_samples_that_one_process_would_read(
    size: int, batch_size: int, num_ranges: int, tail: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(num_ranges)))
    numbers = Numbers((num_ranges - 1) * RANGE_SIZE + tail)
    num_steps = numbers.sizes[0] // (size * batch_size)  # the rest is less than a batch
    desk, alone = Desk(*leases(*order)), RangeBatches(numbers, Desk(*leases(*order)), batch_size=size * batch_size)
    learner = Learner(numbers, desk, size=size, batch_size=batch_size)
    try:
        seen = []
        for _ in range(num_steps):
            now = learner.step()
            assert {len(rows) for rows in now} == {batch_size}, "no rank has more, or less"
            wanted, pieces = alone.next()
            assert [row for rows in zip(*now, strict=True) for row in rows] == wanted.tolist()
            assert [(p.number, p.samples, p.is_whole) for p in desk.collect()] == [
                (p.number, p.samples, p.is_whole) for p in pieces
            ]
            seen += [row for rows in now for row in rows]
        assert len(set(seen)) == len(seen) > numbers.sizes[0] - size * batch_size
    finally:
        learner.close()
        alone.close()


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 4), batch_size=st.integers(1, 3), gone=st.lists(st.integers(0, 3), max_size=4))
def test_a_revoked_range_is_trained_by_all_ranks_or_none(size: int, batch_size: int, gone: list[int]) -> None:
    desk = Desk(*leases(*range(12)))
    learner = Learner(Numbers(48), desk, size=size, batch_size=batch_size)
    counted = Counter[int | None]()
    try:
        for step in range(6):
            if step < len(gone) and (held := list(desk.lessee.begun)):
                desk.lessee.hear(Leases((), gone=(held[gone[step] % len(held)].number,)))
            rows = sum(len(rows) for rows in learner.step())
            pieces = divided(desk.collect(), 10 * rows)
            assert sum(piece.samples for piece in pieces) == rows == size * batch_size
            assert sum(piece.tokens for piece in pieces) == 10 * rows
            desk.lessee.trained(pieces, 10 * rows * step)
            for piece in pieces:
                counted[piece.number if desk.holds(piece.number or 0) else None] += piece.tokens
        assert counted[None] == desk.lessee.num_repeated
    finally:
        learner.close()


def test_a_batch_that_was_tried_comes_again_on_every_rank() -> None:
    learner = Learner(Numbers(24), Desk(*leases(*range(6))), size=2, batch_size=2)
    try:
        tried = [next(batches) for batches in learner.batches]
        for loader in learner.loaders:
            loader.tried()
        assert learner.step() == tried == [[0, 2], [1, 3]]
        assert learner.step() == [[4, 6], [5, 7]]
    finally:
        learner.close()


def test_batches_cut_in_advance_read_nothing_without_a_lease() -> None:
    desk = Desk(*leases(0, 1))
    learner = Learner(Numbers(48), desk, size=2, batch_size=2)
    try:
        assert learner.step() == [[0, 2], [1, 3]]
        assert learner.step() == [[4, 6], [5, 7]]
        desk.grant(*leases(2, first=3))
        assert learner.step() == [[8, 10], [9, 11]]
        assert [piece.number for piece in desk.collect()] == [1, 2, 3]
    finally:
        learner.close()


@given(samples=st.lists(st.integers(0, 9), max_size=6), tokens=st.integers(0, 10_000))
def test_no_token_is_lost_or_invented_in_division(samples: list[int], tokens: int) -> None:
    pieces = divided((Piece(number, n, 0) for number, n in enumerate(samples)), tokens)
    assert [piece.samples for piece in pieces] == samples
    total = sum(samples)
    assert sum(piece.tokens for piece in pieces) == (tokens if total else 0)
    assert all(abs(piece.tokens - tokens * piece.samples / total) < 1 for piece in pieces if total)


def test_each_rank_takes_every_nth_row() -> None:
    rows = torch.arange(12)
    assert [part.tolist() for part in deal(rows, 3)] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
