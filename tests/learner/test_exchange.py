"""The exchange of one learner's tensors, without a syncer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.process.threads import Crew
from lightning_diloco.protocol import events
from tests.devices.rig import BLOCK, Rig
from tests.protocol.harness import ready


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def told() -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


@pytest.fixture
def exchange(rig: Rig, told: queue.SimpleQueue[Any]) -> Iterator[FragmentExchange]:
    crew = Crew(pytest.fail)
    made = FragmentExchange(
        None,  # type: ignore[arg-type]
        "session",
        rig.device,
        plan=rig.plan,
        config=RunConfig(block_size=BLOCK, num_fragments=3),
        crew=crew,
        handle=told.put,
        is_online=lambda: False,
    )
    yield made
    crew.stopping.set()
    made.stop()
    assert crew.join(5.0) == []


@pytest.mark.parametrize("forgets", [True, False])
def test_a_contribution_that_is_decided_before_its_computation_is_not_encoded(
    rig: Rig,
    told: queue.SimpleQueue[Any],
    exchange: FragmentExchange,
    monkeypatch: pytest.MonkeyPatch,
    forgets: bool,
) -> None:
    """Its fragment may land meanwhile, so it would be encoded relative to another anchor."""
    caught_up = threading.Event()
    monkeypatch.setattr(rig.device, "collect", lambda _: caught_up.wait(20.0))
    first, second = ready(0, seq=1), ready(1, seq=1)
    exchange.encode(first)
    exchange.encode(second)
    if forgets:
        exchange.forget(first.fragment, first.seq)
    caught_up.set()
    expected = [second] if forgets else [first, second]
    found = [told.get(timeout=20.0) for _ in expected]
    assert found == [events.Encoded(each.fragment, each.seq) for each in expected]
    assert [*exchange._kept] == [(each.fragment, each.seq) for each in expected]


def test_a_contribution_that_is_decided_while_it_is_encoded_is_not_kept(
    rig: Rig, told: queue.SimpleQueue[Any], exchange: FragmentExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would drop its bytes later, so they would stay until the process ends."""
    first, second, encode = ready(0, seq=1), ready(1, seq=1), rig.device.encode

    def decided_meanwhile(snapshot: Any) -> Any:
        exchange.forget(first.fragment, first.seq)
        return encode(snapshot)

    monkeypatch.setattr(rig.device, "encode", decided_meanwhile)
    exchange.encode(first)
    exchange.encode(second)
    assert told.get(timeout=20.0) == events.Encoded(second.fragment, second.seq)
    assert [*exchange._kept] == [(second.fragment, second.seq)]
