"""A learner's tensors on their way, one learner's without a syncer."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.process.threads import Crew
from lightning_diloco.protocol import events
from tests.devices.rig import BLOCK, Rig
from tests.protocol.harness import ready


@pytest.mark.parametrize("forgets", [True, False])
def test_what_is_decided_before_a_device_has_computed_it_is_not_encoded(
    monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """Its fragment may land meanwhile: what is encoded then would be measured from another anchor."""
    rig, crew, told = Rig(), Crew(pytest.fail), queue.SimpleQueue[Any]()
    caught_up = threading.Event()
    monkeypatch.setattr(rig.device, "collect", lambda _: caught_up.wait(20.0))
    freight = FragmentExchange(
        None,  # type: ignore[arg-type]
        "session",
        rig.device,
        plan=rig.plan,
        config=RunConfig(block_size=BLOCK, num_fragments=3),
        crew=crew,
        handle=told.put,
        is_online=lambda: False,
    )
    first, second = ready(0, seq=1), ready(1, seq=1)
    freight.encode(first)
    freight.encode(second)
    if forgets:
        freight.forget(first.fragment, first.seq)
    caught_up.set()
    expected = [second] if forgets else [first, second]
    found = [told.get(timeout=20.0) for _ in expected]
    assert found == [events.Encoded(each.fragment, each.seq) for each in expected]
    assert [*freight._kept] == [(each.fragment, each.seq) for each in expected]
    crew.stopping.set()
    freight.stop()
    assert crew.join(5.0) == []
