"""Payloads that are too long for one call: seeds, contributions, full fetches and updates in portions."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.config import Wire as Wires
from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.core.parts import part_of
from lightning_diloco.core.quantize import encode
from lightning_diloco.errors import AuthError, CorruptMessageError, JoinError, TransportError
from lightning_diloco.learner import join as joining
from lightning_diloco.protocol import messages
from lightning_diloco.syncer import payloads as bulk
from lightning_diloco.syncer.assembly import Assemblies
from lightning_diloco.transport import portions
from lightning_diloco.transport.base import Bulk, Connection, Json
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from lightning_diloco.transport.portions import Portioned
from lightning_diloco.transport.streams import NumStreams
from tests.fuzz.target import Peer
from tests.learner.fleet import RUN, Fleet, Learner, Wire, assert_exact, finish, until

SIZE = 80  # bytes; a fragment of the fleet's model has about 600 as float32, and 170 as int8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", SIZE)


class Watched(Wire):
    """A connection that records its calls, and may fail."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.puts: list[Bulk] = []
        self.gets: list[Bulk] = []
        self.fails_at: set[int] = set()  # number of the call

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        self.puts.append(bulk)
        if len(self.puts) in self.fails_at:
            raise TransportError("the line is cut")
        return super().put(bulk, deadline_s=deadline_s)

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        self.gets.append(super().get(header, deadline_s=deadline_s))
        return self.gets[-1]


def watched(fleet: Fleet, learner: Learner) -> Watched:
    learner.wire = line = Watched(fleet.connect())
    return line


@pytest.mark.seconds
@pytest.mark.parametrize("wire", ["int8", "int4", "fp32"])
def test_a_run_whose_payloads_are_all_too_long_for_one_call_is_exact(tmp_path: Path, wire: str) -> None:
    with Fleet(tmp_path) as fleet:
        server = FlightServer(fleet.service, "127.0.0.1:0", token="secret", max_payload_bytes=SIZE)
        with server:
            fleet.connect = lambda: FlightConnection(server.join_address(RUN), max_payload_bytes=SIZE)
            learners = [fleet.learner(name, wire=wire) for name in ("l0", "l1")]
            lines = [watched(fleet, learner) for learner in learners]
            for learner in learners:
                learner.go()
            fleet.until_commits(6)
            finish(*learners)
            last = next(learner for learner in learners if learner.is_last)
            assert last.digests() == list(fleet.service._store.digests())
            summary = fleet.stop()
    assert summary["tokens_merged"] == summary["tokens_seen"] > 0
    assert_exact(summary)
    for line in lines:
        assert {b.payload.nbytes <= SIZE for b in line.puts + line.gets} == {True}
    whats = {b.header["what"] for line in lines for b in line.puts if "at" in b.header}
    kinds = {b.header["kind"] for line in lines for b in line.gets if "at" in b.header}
    assert (whats, kinds) == ({"seed", "contribution"}, {"full", "chain"})


def test_an_interrupted_upload_continues_at_its_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0")
        line = watched(fleet, learner)
        line.fails_at = {3, 6, 7}
        learner.join()
        sent = [(b.header["fragment"], b.header["at"]) for b in line.puts]
        assert sent[:5] == [(0, 0), (0, SIZE), (0, 2 * SIZE), (0, 0), (0, 2 * SIZE)]
        assert learner.digests() == list(fleet.service._store.digests())


def test_a_download_continues_the_version_it_began_with_while_commits_go_on(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").go()
        other = fleet.learner("l1").join()
        other.wire.is_cut = True  # otherwise it would also request updates
        session = other.link._session
        asked = {"session": session, "fragment": 0, "generation": None, "have": None, "mark": "m"}
        whole = fleet.service._store.anchor(0)
        began = fleet.connect().get(asked, deadline_s=5.0)
        until(lambda: fleet.versions[0] > began.header["version"], "a commit of this fragment")
        rest = fleet.connect().get({**asked, "at": SIZE}, deadline_s=5.0)
        if whole.version == began.header["version"]:
            assert (rest.header["at"], rest.header["version"]) == (SIZE, began.header["version"])
            assert bytes(rest.payload) == bytes(bytes_of(whole.published))[SIZE : 2 * SIZE]
        # Nothing is kept for an invented session, so every request gets the current version.
        made_up = {**asked, "session": "made up"}
        version = fleet.connect().get(made_up, deadline_s=5.0).header["version"]
        until(lambda: fleet.versions[0] > version, "another commit of this fragment")
        assert fleet.connect().get({**made_up, "at": SIZE}, deadline_s=5.0).header["version"] > version
        assert set(fleet.service._desk._given) <= {session, learner.link._session}
        learner.enough().done()


class Giving:
    """A connection that gives a payload in portions; `answers` may change the header of one of them."""

    send = poll = status = close = None

    def __init__(self, payload: bytes, **changes: Json) -> None:
        self.payload, self.changes = memoryview(payload), changes
        self.asked: list[Json] = []
        self.put_at: list[int] = []

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        self.asked.append(header)
        start, stop = portions.asked_range(header, len(self.payload))
        changed = self.changes.get(f"call{len(self.asked)}", {})
        return Bulk({"version": 1, "at": start, "of": len(self.payload)} | changed, self.payload[start:stop])


@pytest.mark.parametrize("num", [1, 3, 7])
@pytest.mark.parametrize("length", [0, 1, 5, SIZE, 5 * SIZE + 3])
def test_portions_of_several_streams_give_the_same_payload(
    length: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumStreams, "number_for", lambda *_: num)
    line = Giving(bytes(k % 251 for k in range(length)))
    found = Portioned(line).get({"fragment": 0}, deadline_s=1.0)  # type: ignore[arg-type]
    assert (bytes(found.payload), found.header) == (bytes(line.payload), {"version": 1})
    if length > SIZE:
        assert np.shares_memory(tensor_of(found.payload, torch.uint8).numpy(), found.payload), "a second copy"
    assert len({asked["mark"] for asked in line.asked}) == 1
    assert {tuple(asked["span"]) for asked in line.asked} == {(k, num) for k in range(num)}


def test_portions_of_two_updates_are_never_joined() -> None:
    line = Giving(bytes(2 * SIZE), call2={"version": 2})
    with pytest.raises(TransportError, match="changed while it was downloaded"):
        Portioned(line).get({"fragment": 0}, deadline_s=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", [{"at": SIZE + 1}, {"of": SIZE + 1}, {"of": 9 * SIZE}])
def test_bytes_that_do_not_follow_are_refused(changed: Json) -> None:
    line = Giving(bytes(2 * SIZE), call2=changed)
    with pytest.raises((CorruptMessageError, TransportError)):
        Portioned(line).get({"fragment": 0}, deadline_s=1.0)  # type: ignore[arg-type]


class Taking:
    """A connection that accepts portions in any order; it may fail, and may lose all data like a restart."""

    send = poll = status = close = None

    def __init__(self, *, fails_at: int = 0, loses_at: int = 0) -> None:
        self.fails_at, self.loses_at, self.num_bytes = fails_at, loses_at, 0
        self.portions: list[tuple[int, int]] = []
        self.whole = bytearray()
        self.received: portions.Received | None = None
        self._lock = threading.Lock()

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        with self._lock:
            at, of = portions.place(bulk)
            self.portions.append((at, at + bulk.payload.nbytes))
            if len(self.portions) == self.fails_at:
                raise TransportError("the line is cut")
            if self.received is None or len(self.portions) == self.loses_at:
                self.received, self.whole = portions.Received(of), bytearray(of)
            self.whole[at : at + bulk.payload.nbytes] = bulk.payload
            self.received.add(at, bulk.payload.nbytes)
            self.num_bytes += bulk.payload.nbytes
            return {"missing": self.received.missing}


@pytest.mark.parametrize("num", [1, 3, 7])
def test_only_missing_bytes_are_sent_again(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumStreams, "number_for", lambda *_: num)
    sent = bytes(k % 251 for k in range(9 * SIZE + 5))
    bulk = Bulk({"what": "contribution"}, memoryview(sent))
    line = Taking(fails_at=6)
    connection = Portioned(line)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="cut"):
        connection.put(bulk, deadline_s=1.0)
    there = line.num_bytes
    connection.put(bulk, deadline_s=1.0)
    assert bytes(line.whole) == sent
    assert there >= 5 * min(SIZE, len(sent) // num)
    assert line.num_bytes <= len(sent) + num * SIZE, "the first portion of each stream may come twice"


@pytest.mark.parametrize("num", [1, 4])
def test_a_syncer_that_has_lost_all_bytes_gets_all_bytes(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumStreams, "number_for", lambda *_: num)
    sent = bytes(k % 251 for k in range(9 * SIZE + 5))
    line = Taking(loses_at=8)
    Portioned(line).put(Bulk({}, memoryview(sent)), deadline_s=1.0)  # type: ignore[arg-type]
    assert bytes(line.whole) == sent


def test_many_gaps_are_summarized_and_too_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "MAX_GAPS", 3)
    monkeypatch.setattr(portions, "MAX_RANGES", 9)
    received = portions.Received(100)
    for at in range(0, 90, 10):
        received.add(at, 1)
    assert received.missing == [(1, 10), (11, 20), (21, 100)]
    with pytest.raises(CorruptMessageError, match="more than 9 pieces"):
        received.add(95, 1)


@pytest.mark.parametrize("asked", [{"span": [1, 1]}, {"span": "0 of 1"}, {"span": [0, 1.5]}, {"at": -1}, {"at": True}])
def test_a_request_for_an_impossible_range_is_refused(asked: Json) -> None:
    with pytest.raises(CorruptMessageError, match="span must be"):
        portions.asked_range(asked, 100)


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16"])
def test_portions_of_ranks_parts_are_assembled_in_the_memory_of_one_contribution(wire: Wires) -> None:
    config = RunConfig(wire=wire, block_size=16)
    numel, num_parts, ready = 16 * 40 + 8, 3, messages.Ready(0, 1, 0, 0, 0, 8, 4)
    whole = encode(torch.linspace(-1.0, 1.0, numel), wire=wire, block_size=16, name="x")
    assemblies, found = Assemblies(), None
    for k in reversed(range(num_parts)):
        part = bytes_of(part_of(whole, k, num_parts, numel=numel, wire=wire, block_size=16))
        starts = list(range(0, part.nbytes, SIZE))
        for at in starts[1::2] + starts[::2]:
            header = {"part": k, "num_parts": num_parts, "at": at, "of": part.nbytes}
            portion = Bulk(header, part[at : at + SIZE])
            missing, found = assemblies.add("s", ready, portion, numel=numel, config=config)
            if found is None:
                assert assemblies.nbytes == whole.nbytes
                assert assemblies.add("s", ready, portion, numel=numel, config=config) == (missing, None)
        assert missing == []
    assert found is not None
    assert torch.equal(found, whole)
    assert assemblies.nbytes == 0


def test_portions_outside_of_the_payload_are_refused(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        peer = Peer(fleet.connect(), "l0")
        peer.say(messages.Hello("l0", 1, PROTOCOL_VERSION, {}))
        grant = peer.hear(messages.SeedGrant)
        header = {"what": "seed", "session": peer.session, "lease": grant.lease, "fragment": 0}
        for at, of in ((0, 2), (-4, 8), (8, 8), ("0", 8), (0, 1.5), (0, "8"), (True, 8)):
            with pytest.raises(CorruptMessageError, match=r"must be integers, with all bytes within"):
                peer.connection.put(Bulk({**header, "at": at, "of": of}, memoryview(b"1234")), deadline_s=1.0)
        put = peer.connection.put
        for at, missing in ((4, [[0, 4]]), (4, [[0, 4]]), (0, []), (0, [])):
            assert put(Bulk({**header, "at": at, "of": 8}, memoryview(b"1234")), deadline_s=1.0) == {"missing": missing}


def test_a_seed_that_exceeds_the_memory_is_refused_at_once_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "memory_here", lambda: 512)
    began_s = time.monotonic()
    with Fleet(tmp_path) as fleet, pytest.raises(JoinError, match="the syncer's machine has 512 bytes of memory"):
        fleet.learner("l0").join()
    assert time.monotonic() - began_s < 5.0


def test_an_error_in_a_message_is_raised_and_not_treated_as_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "AGAIN_S", 0.01)

    def refuse() -> None:
        raise CorruptMessageError("the payload has another length than declared")

    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0")
        learner.wire.before["put"] = refuse
        with pytest.raises(CorruptMessageError, match="another length"):
            learner.join()
        other = fleet.learner("l1")

        def wrong_token() -> None:
            raise AuthError("the token is another one")

        other.wire.before["send"] = wrong_token
        with pytest.raises(AuthError, match="another one"):
            other.join()


def test_a_contribution_that_has_arrived_is_not_requested_again(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0")
        line = watched(fleet, learner)
        learner.go()
        fleet.until_commits(2)
        learner.enough().done()
        first = next(b for b in line.puts if b.header["what"] == "contribution" and b.header.get("at") == 0)
        answer = fleet.connect().put(first, deadline_s=1.0)
    assert answer == {"missing": []}
