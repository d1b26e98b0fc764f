"""Generated messages against a live syncer: it applies none that is invalid, does not fail, and serves the honest
learner.

The slow suite sends 2,000 messages, `-m fuzz` sends 4 x 25,000.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_diloco.config import PROTOCOL_VERSION
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.quantize import encode
from lightning_diloco.errors import CorruptMessageError, DiLoCoError, TransportError
from lightning_diloco.protocol import messages
from lightning_diloco.syncer import outbox, service
from lightning_diloco.syncer.process import SyncerOptions, SyncerService
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.base import Bulk
from tests.fuzz.strategies import (
    BAD_SCALES,
    GOOD_SCALE,
    Flawed,
    control_messages,
    flawed_contributions,
    integers,
    json_objects,
    json_values,
    near_valid,
    texts,
)
from tests.fuzz.target import STEP_S, STEPS, TOKENS, Honest, Peer, Target, held_bytes, message_fields
from tests.transport.memory import MemoryTransport

NUM_VALUES, NUM_SCALES = 64, 4
CHECK_EVERY = 100
MAX_GROWTH_BYTES = 4 << 20  # each time Mallory leaves and joins again, the syncer remembers one more session

sends = st.tuples(st.just("send"), st.booleans(), st.lists(control_messages, min_size=1, max_size=4))
single_sends = st.tuples(st.just("send"), st.just(True), st.lists(near_valid, min_size=1, max_size=1))
puts = st.tuples(st.just("put"), st.booleans(), flawed_contributions(NUM_VALUES, NUM_SCALES))
odd_puts = st.tuples(st.just("odd put"), json_objects, st.binary(max_size=300))
seeds = st.tuples(st.just("seed"), integers | json_values, integers | json_values, st.binary(max_size=300))
gets = st.tuples(st.just("get"), integers | json_values, integers | json_values, integers | json_values)
polls = st.tuples(st.just("poll"), texts, integers)
replays = st.tuples(st.just("replay"), st.integers(0, 100))
attacks = sends | single_sends | puts | puts | odd_puts | seeds | gets | polls | replays


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    target = Target(tmp_path)
    assert target.honest.payload_nbytes(0) == NUM_VALUES + 2 * NUM_SCALES
    yield target
    target.service.stop()


def put_flawed(target: Target, session: str, flawed: Flawed) -> None:
    """Send a contribution that would be merged in the next round without its flaw."""
    p = flawed.ready["fragment"]
    base, generation = target.honest.versions[p], target.honest.generation
    ready = {"seq": next(target.seqs), "base": base, "generation": generation, **flawed.ready, **flawed.flaw}
    ready = {name: value for name, value in ready.items() if value is not None}
    if flawed.is_announced:
        with contextlib.suppress(DiLoCoError):
            target.wire.send(session, [{"kind": "Intent", "fragment": p, "step_s": 0.01}, {"kind": "Ready", **ready}])
    target.wire.put({"session": session, "ready": ready}, flawed.payload)


def attack(target: Target, what: tuple[Any, ...]) -> None:
    """Run one attack; a refusal is expected, any other error is a bug of the syncer."""
    wire, session = target.wire, target.mallory.session
    with contextlib.suppress(DiLoCoError):
        match what:
            case "send", as_mallory, said:
                wire.send(session if as_mallory else "stranger", said)
            case "put", as_mallory, Flawed() as flawed:
                put_flawed(target, session if as_mallory else "stranger", flawed)
            case "odd put", header, payload:
                wire.put(header, payload)
            case "seed", fragment, lease, payload:
                wire.put({"what": "seed", "session": session, "fragment": fragment, "lease": lease}, payload)
            case "get", fragment, generation, have:
                wire.get({"session": session, "fragment": fragment, "generation": generation, "have": have})
            case "poll", polled, cursor:
                wire.poll(polled, cursor)
            case "replay", number:
                target.honest.replay(number)
    assert target.reported == []


@pytest.mark.parametrize(
    "num_messages",
    [pytest.param(2_000, marks=pytest.mark.slow), *[pytest.param(25_000, marks=pytest.mark.fuzz)] * 4],
)
def test_generated_messages_are_never_applied_and_do_not_affect_the_honest_learner(
    target: Target, num_messages: int
) -> None:
    before_bytes = held_bytes(target.service)
    journal: deque[object] = deque(maxlen=CHECK_EVERY)
    failures: list[Exception] = []
    count = itertools.count(1)

    # The target keeps its state between examples, so an example cannot be repeated or shrunk.
    @settings(max_examples=num_messages, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(attacks)
    def run(what: tuple[Any, ...]) -> None:
        if failures:
            return
        journal.append(what)
        try:
            if not target.is_mallory_in():
                target.mallory = target.admit_mallory()
            attack(target, what)
            if next(count) % CHECK_EVERY == 0:
                target.check()
        except Exception as error:
            failures.append(error)

    run()
    if failures:
        raise AssertionError("after these:\n" + "\n".join(map(repr, journal))) from failures[0]
    assert next(count) > num_messages
    target.check()
    target.honest.leave()
    assert held_bytes(target.service) - before_bytes < MAX_GROWTH_BYTES


@pytest.mark.parametrize("scale", BAD_SCALES, ids=["NaN", "Inf", "-Inf", "negative"])
def test_one_bad_scale_is_refused_and_the_run_continues(target: Target, scale: bytes) -> None:
    payload = bytes(NUM_VALUES) + 3 * GOOD_SCALE + scale
    put_flawed(
        target, target.mallory.session, Flawed({"fragment": 0, "start": 0, "stop": 9, "steps": 1}, {}, payload, True)
    )
    target.check()
    mallory = target.service.state.roster[target.mallory.session]
    assert (mallory.fates[0][1], mallory.num_refused) == ("refused", 1)


@pytest.mark.slow
def test_invented_sessions_take_bounded_memory(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_SESSIONS", 50)
    for number in range(3000):
        session = f"made up {number}"
        target.wire.poll(session, 0)
        target.wire.send(session, [{"kind": "AskFate", "fragment": 0, "seq": 1}])
        with contextlib.suppress(DiLoCoError):
            target.wire.get({"session": session, "fragment": 0, "have": None, "generation": None})
    target.check()
    service = target.service
    sizes = (len(service._outbox._queues), len(service._ending._polled_s), len(service._inbox._heard))
    assert all(size <= 50 for size in sizes), sizes
    assert len(service._desk._payloads) <= 2


def test_one_payload_per_session_and_fragment_is_kept(target: Target) -> None:
    """The payloads are valid, but too many to wait for their rounds."""
    payload = bytes(NUM_VALUES) + NUM_SCALES * GOOD_SCALE
    session, desk = target.mallory.session, target.service._desk
    num_refused = 0
    for seq in range(1, 400):
        ready = {"fragment": 0, "seq": seq, "base": 0, "generation": 0, "start": 0, "stop": 9, "steps": 1}
        with contextlib.suppress(CorruptMessageError):
            num_refused += 1
            target.wire.put({"session": session, "ready": ready}, payload)
            num_refused -= 1
        target.wire.put({"session": f"stranger {seq}", "ready": ready}, payload)
        assert len(desk._payloads) <= 1
    assert num_refused > 0
    progress = messages.Progress(1, 9, (0, 0), (((0, 9),),) * 2)
    target.mallory.say(messages.Leave("finished", progress, 1.0))
    target.check()
    assert len(desk._payloads) == 0


def test_a_payload_that_is_repeated_after_its_fate_is_not_kept(target: Target) -> None:
    """Otherwise the sender's next payload would have to wait until the syncer has repeated the fate."""
    target.honest.train()
    sent = [said for said in target.honest.said if isinstance(said, Bulk)]
    handle = target.service.state.handle
    with pytest.MonkeyPatch.context() as busy:
        is_free = threading.Event()
        busy.setattr(target.service.state, "handle", lambda *event: is_free.wait() and handle(*event))
        for bulk in sent:
            target.honest.connection.put(bulk, deadline_s=5.0)
        assert target.service._desk._payloads == {}
        is_free.set()
    target.check()


def test_calls_are_refused_while_too_many_events_wait(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    most = service.MAX_WAITING
    monkeypatch.setattr(service, "MAX_WAITING", 500)
    handle, is_free = target.service.state.handle, threading.Event()
    monkeypatch.setattr(target.service.state, "handle", lambda *event: is_free.wait() and handle(*event))
    num_taken, refusal = 0, ""
    while not refusal:
        try:
            target.wire.send(target.honest.session, [{"kind": "AskFate", "fragment": 0, "seq": 1}])
            num_taken += 1
        except DiLoCoError as error:
            refusal = str(error)
    is_free.set()
    monkeypatch.setattr(service, "MAX_WAITING", most)
    assert num_taken <= 501
    assert "at most 500 may wait" in refusal
    target.settle()
    target.check()


def test_a_call_with_too_many_messages_is_refused_as_a_whole(target: Target) -> None:
    with pytest.raises(TransportError, match="10001 events for the syncer"):
        target.wire.send("stranger", [{"kind": "AskFate", "fragment": 0, "seq": 1}] * 10_001)
    target.check()


def test_only_start_values_of_the_seeder_are_kept(tmp_path: Path) -> None:
    """Before the seed, any peer with the token may send start values; those that were not requested are dropped."""
    served = SyncerService(SyncerOptions(run_dir=tmp_path), run="run", durable=SyncerStore(tmp_path))
    transport = MemoryTransport(served)
    served.start()
    peers = [Peer(transport.connect(), name) for name in ("seeder", "other")]
    for peer in peers:
        peer.say(messages.Hello(peer.learner, 1, PROTOCOL_VERSION, {}))
    grant = peers[0].hear(messages.SeedGrant)
    for session in (*(peer.session for peer in peers), "stranger"):
        for lease in (-1, grant.lease, 7, 8):
            for p in (-1, 0, 1, 2**40):
                header = {"what": "seed", "session": session, "lease": lease, "fragment": p}
                transport.connect().put(Bulk(header, memoryview(bytes(64))), deadline_s=5.0)
    assert set(served._desk._seed) == {(peers[0].session, grant.lease, p) for p in (0, 1)}
    served.stop()


def test_start_values_are_not_kept_after_the_seed(target: Target) -> None:
    for number in range(20):
        header = {"what": "seed", "session": target.mallory.session, "fragment": number % 2, "lease": number}
        target.wire.put(header, bytes(256))
    target.check()
    assert target.service._desk._seed == {}


class Absurd(Honest):
    """Sends finite values close to the largest float32."""

    def payload(self, p: int) -> Tensor:
        x = torch.full((self.plan.layout(p, self.config.block_size).padded_numel,), 3e38)
        return encode(x, wire=self.config.wire, block_size=self.config.block_size, name="x")


@pytest.mark.seconds
def test_values_that_would_overflow_the_anchor_are_refused_before_usual_norms_are_known(target: Target) -> None:
    """The outer gradient is finite, but the next anchor would not be; this is detected before the commit is written."""
    absurd = Absurd(target.transport.connect(), "absurd")
    absurd.join()
    intent, ready = messages.Intent(0, STEP_S), messages.Ready(0, 1, 0, 0, 0, TOKENS, STEPS)
    absurd.say(intent)
    absurd.hear(messages.Announce, intent, fragment=0)
    absurd.say(ready)
    header = {"session": absurd.session, "ready": message_fields(ready)}
    absurd.connection.put(Bulk(header, bytes_of(absurd.payload(0))), deadline_s=5.0)
    fate = absurd.hear(messages.FateIs, messages.AskFate(0, 1), fate="refused")
    assert "not finite" in fate.reason or "NaN or Inf" in fate.reason
    target.check()


@pytest.mark.slow
def test_an_extreme_norm_is_scaled_down_to_the_usual_one(target: Target) -> None:
    """The contribution is finite, but 10^30 times too long: merged without scaling, it would destroy the run."""
    for _ in range(10):
        target.honest.train()
    before = target.service._store.anchor(0).published.clone()
    merged = target.service.state.ledger.totals().merged
    target.honest.scale = 1e30
    target.honest.train()
    target.honest.scale = 1.0
    moved = (target.service._store.anchor(0).published - before).abs().max()
    assert 0 < moved < 1.0
    assert target.service.state.ledger.totals().merged == merged, "no token of it is merged"
    target.honest.start -= TOKENS  # so the rest goes into the next contribution
    target.check()
    (learner,) = [x for x in target.service.on_status()["learners"] if x["id"] == "honest"]
    assert (learner["num_clipped"], learner["num_refused"]) == (2, 0)  # one in each fragment
