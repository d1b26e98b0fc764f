"""Contributions that arrive in parts are merged and dropped as one, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.core.parts import part_of
from lightning_diloco.errors import CorruptMessageError, TransportError
from lightning_diloco.protocol.learner import fragment
from lightning_diloco.transport.base import Bulk, Json
from tests.learner.fleet import OPTIONS, Fleet, Learner, until

NUM_PARTS = 3


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fates are asked again soon."""
    monkeypatch.setattr(fragment, "ASK_AGAIN_S", 0.05)


def parts_of(learner: Learner, bulk: Bulk) -> list[Bulk]:
    """Return a contribution in the parts that several ranks send."""
    config, p = learner.link.config, bulk.header["ready"]["fragment"]
    numel = learner.link.plan.layout(p, config.block_size).padded_numel
    whole, kinds = tensor_of(bulk.payload, torch.uint8), {"wire": config.wire, "block_size": config.block_size}
    parts = [part_of(whole, k, NUM_PARTS, numel=numel, **kinds) for k in range(NUM_PARTS)]
    return [Bulk({**bulk.header, "part": k, "num_parts": NUM_PARTS}, bytes_of(part)) for k, part in enumerate(parts)]


def cut_up(learner: Learner, send: Callable[[list[Bulk], Callable[[Bulk], Json]], None]) -> Learner:
    """Send contributions by `send`, which gets the parts and a function that sends one of them."""
    put = learner.wire.put

    def put_parts(bulk: Bulk, *, deadline_s: float) -> Json:
        if bulk.header["what"] != "contribution":
            return put(bulk, deadline_s=deadline_s)
        send(parts_of(learner, bulk), lambda part: put(part, deadline_s=deadline_s))
        return {}

    learner.wire.put = put_parts  # type: ignore[method-assign]
    return learner


def waiting(fleet: Fleet) -> int:
    return fleet.service._desk._assemblies.nbytes


def test_parts_in_any_order_and_with_repetitions_count_once(tmp_path: Path) -> None:
    orders = [0]

    def send(parts: list[Bulk], put: Callable[[Bulk], Json]) -> None:
        orders[0] += 1
        turn = orders[0] % NUM_PARTS
        for part in (*parts[turn:], *parts[:turn], parts[turn]):
            put(part)
            put(part)

    with Fleet(tmp_path) as fleet:
        learners = [cut_up(fleet.learner(name), send).go() for name in ("l0", "l1")]
        fleet.until_commits(6)
        for learner in learners:
            learner.enough().done()
        assert waiting(fleet) == 0
        summary = fleet.stop()
    assert (summary["status"], summary["ledger_exact"]) == ("finished", True)
    assert summary["tokens_merged"] == summary["tokens_seen"] > 0


@pytest.mark.seconds
def test_a_lost_part_is_sent_again_and_the_others_are_not_used_without_it(tmp_path: Path) -> None:
    lost: list[Bulk] = []

    def send(parts: list[Bulk], put: Callable[[Bulk], Json]) -> None:
        for part in parts:
            if len(lost) < 4 and part is parts[1]:
                lost.append(part)
                raise TransportError("the line of this rank is cut")
            put(part)

    with Fleet(tmp_path) as fleet:
        learner = cut_up(fleet.learner("l0"), send).go()
        until(lambda: lost, "a part that is lost")
        until(lambda: len(lost) == 4, "other attempts")
        fleet.until_commits(3)
        learner.enough().done()
        assert waiting(fleet) == 0
        summary = fleet.stop()
    assert summary["ledger_exact"]
    assert summary["tokens_merged"] == summary["tokens_seen"]


def test_incomplete_contributions_take_bounded_memory_and_are_dropped_with_their_learner(tmp_path: Path) -> None:
    first: list[tuple[list[Bulk], Callable[[Bulk], Json]]] = []

    def send(parts: list[Bulk], put: Callable[[Bulk], Json]) -> None:
        if not first:
            first.append((parts, put))
        put(parts[0])
        raise TransportError("the line of the other ranks is cut")

    with Fleet(tmp_path) as fleet:
        learner = cut_up(fleet.learner("l0", drain_s=0.2), send).go()
        until(lambda: waiting(fleet), "a part")
        parts, put = first[0]
        bound = sum(len(part.payload) for part in parts) * OPTIONS["num_fragments"]
        assert 0 < waiting(fleet) < bound
        assert fleet.num_commits == 0
        _refuses_what_is_no_part(parts[1], put)
        learner.enough().done()
        until(lambda: waiting(fleet) == 0, "its parts to go")
        fleet.connect().put(parts[1], deadline_s=1.0)  # of a learner that has left; not kept
        assert waiting(fleet) == 0
        summary = fleet.stop()
    assert (summary["rounds"], summary["tokens_merged"]) == (0, 0)


def _refuses_what_is_no_part(part: Bulk, put: Callable[[Bulk], Json]) -> None:
    for change in ({"part": NUM_PARTS}, {"part": "1"}, {"num_parts": NUM_PARTS + 1}, {"num_parts": 1 << 40}):
        with pytest.raises(CorruptMessageError, match="nothing of it was used"):
            put(Bulk({**part.header, **change}, part.payload))
    with pytest.raises(CorruptMessageError, match="bytes as part 1 of 3"):
        put(Bulk(part.header, part.payload[:-1]))
    ready = part.header["ready"]
    with pytest.raises(CorruptMessageError, match="all ranks must send parts of the newest"):
        put(Bulk({**part.header, "ready": {**ready, "stop": ready["stop"] + 1}}, part.payload))
