"""Payloads longer than one call takes: seeds, contributions, full fetches and updates travel in portions."""

from __future__ import annotations

import time
from pathlib import Path

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
from tests.fuzz.target import Peer
from tests.learner.fleet import RUN, Fleet, Learner, Wire, assert_exact, finish, until

SIZE = 80  # bytes; a fragment of the fleet's model has some 600 as float32, and 170 as int8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", SIZE)


class Watched(Wire):
    """A line that notes what goes by, and may fail."""

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


def test_an_upload_that_broke_off_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        other.wire.is_cut = True  # or it would ask, too
        session = other.link._session
        asked = {"session": session, "fragment": 0, "generation": None, "have": None}
        whole = fleet.service._store.anchor(0)
        began = fleet.connect().get(asked, deadline_s=5.0)
        until(lambda: fleet.versions[0] > began.header["version"], "a commit of this fragment")
        rest = fleet.connect().get({**asked, "at": SIZE, "mark": began.header["mark"]}, deadline_s=5.0)
        if whole.version == began.header["version"]:
            assert (rest.header["at"], rest.header["version"]) == (SIZE, began.header["version"])
            assert bytes(rest.payload) == bytes(bytes_of(whole.published))[SIZE : 2 * SIZE]
        # Nothing is kept for a session that is made up: it begins anew with what is there now.
        made_up = {**asked, "session": "made up"}
        mark = fleet.connect().get(made_up, deadline_s=5.0).header["mark"]
        until(lambda: str(fleet.versions[0]) != mark.split()[-1], "another commit of this fragment")
        assert fleet.connect().get({**made_up, "at": SIZE, "mark": mark}, deadline_s=5.0).header["at"] == 0
        assert set(fleet.service._desk._given) <= {session}
        learner.enough().done()


def test_what_is_begun_anew_in_between_is_put_together_of_one_payload_only() -> None:
    old, new = bytes(range(2 * SIZE)), bytes(range(50, 50 + 2 * SIZE))

    class Restarted:
        send = poll = status = close = put = None

        def __init__(self) -> None:
            self.asked: list[Json] = []

        def get(self, header: Json, *, deadline_s: float) -> Bulk:
            self.asked.append(header)
            at, source, version = [(0, old, 1), (0, new, 2), (SIZE, new, 2)][len(self.asked) - 1]
            mark = {"version": version, "mark": f"m{version}", "at": at, "of": 2 * SIZE}
            return Bulk(mark, memoryview(source)[at : at + SIZE])

    line = Restarted()
    found = Portioned(line).get({"fragment": 0}, deadline_s=1.0)  # type: ignore[arg-type]
    assert (bytes(found.payload), found.header) == (new, {"version": 2})
    assert line.asked[1:] == [{"fragment": 0, "at": SIZE, "mark": mark} for mark in ("m1", "m2")]
    assert tensor_of(found.payload, torch.uint8).data_ptr() == tensor_of(found.payload, torch.uint8).data_ptr(), (
        "copied"
    )


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16"])
def test_portions_of_ranks_parts_come_together_in_the_memory_of_one_contribution(wire: Wires) -> None:
    config = RunConfig(wire=wire, block_size=16)
    numel, num_parts, ready = 16 * 40 + 8, 3, messages.Ready(0, 1, 0, 0, 0, 8, 4)
    whole = encode(torch.linspace(-1.0, 1.0, numel), wire=wire, block_size=16, name="x")
    assemblies, found = Assemblies(), None
    for k in reversed(range(num_parts)):
        part = bytes_of(part_of(whole, k, num_parts, numel=numel, wire=wire, block_size=16))
        have = 0
        while have < part.nbytes:
            header = {"part": k, "num_parts": num_parts, "at": have, "of": part.nbytes}
            portion = Bulk(header, part[have : have + SIZE])
            have, found = assemblies.add("s", ready, portion, numel=numel, config=config)
            if found is None:
                assert assemblies.nbytes == whole.nbytes
                assert assemblies.add("s", ready, portion, numel=numel, config=config) == (have, None)
    assert found is not None
    assert torch.equal(found, whole)
    assert assemblies.nbytes == 0


def test_portions_that_do_not_lie_within_the_whole_are_refused(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        peer = Peer(fleet.connect(), "l0")
        peer.say(messages.Hello("l0", 1, PROTOCOL_VERSION, {}))
        grant = peer.hear(messages.SeedGrant)
        header = {"what": "seed", "session": peer.session, "lease": grant.lease, "fragment": 0}
        for at, of in ((0, 2), (-4, 8), (8, 8), ("0", 8), (0, 1.5), (0, "8"), (True, 8)):
            with pytest.raises(CorruptMessageError, match=r"must be integers, with all bytes within"):
                peer.connection.put(Bulk({**header, "at": at, "of": of}, memoryview(b"1234")), deadline_s=1.0)
        put = peer.connection.put
        assert put(Bulk({**header, "at": 4, "of": 8}, memoryview(b"1234")), deadline_s=1.0) == {"have": 0}
        assert put(Bulk({**header, "at": 0, "of": 8}, memoryview(b"1234")), deadline_s=1.0) == {"have": 4}
        assert put(Bulk({**header, "at": 0, "of": 8}, memoryview(b"1234")), deadline_s=1.0) == {"have": 4}
        assert put(Bulk({**header, "at": 4, "of": 8}, memoryview(b"1234")), deadline_s=1.0) == {"have": 8}


def test_a_seed_that_no_memory_holds_is_refused_at_once_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "memory_here", lambda: 512)
    began_s = time.monotonic()
    with Fleet(tmp_path) as fleet, pytest.raises(JoinError, match="the syncer's machine has 512 bytes of memory"):
        fleet.learner("l0").join()
    assert time.monotonic() - began_s < 5.0


def test_what_is_wrong_with_a_message_is_raised_as_that_and_not_as_silence(
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


def test_a_contribution_that_came_before_is_not_asked_for_again(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0")
        line = watched(fleet, learner)
        learner.go()
        fleet.until_commits(2)
        learner.enough().done()
        first = next(b for b in line.puts if b.header["what"] == "contribution" and b.header.get("at") == 0)
        answer = fleet.connect().put(first, deadline_s=1.0)
    assert answer == {"have": first.header["of"]}
