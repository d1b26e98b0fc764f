"""Attacks on a syncer's address affect only their sender; the attacks are in `wire`."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import lightning_diloco
from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import messages
from lightning_diloco.syncer import inbox, outbox
from lightning_diloco.syncer.process import SyncerOptions, SyncerService
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import JoinAddress, split_host_port
from lightning_diloco.transport.base import Bulk
from lightning_diloco.transport.doorkeeper import Doorkeeper
from lightning_diloco.transport.faults import FaultProxy
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from tests.attacks import wire
from tests.e2e.conftest import Processes, until
from tests.fuzz.target import OPTIONS, Honest, Peer
from tests.transport.conftest import Recorder
from tests.transport.memory import MemoryTransport

WAIT_S = 10.0
MIB = 1 << 20
FEW_FILES = 256
Held = Callable[[JoinAddress, int], AbstractContextManager[list[socket.socket]]]


def has_ended(line: socket.socket) -> bool:
    """Wait for the end of a connection."""
    line.settimeout(WAIT_S)
    try:
        while line.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


# --- without a token: connections


@pytest.fixture
def serve() -> Iterator[Callable[[Doorkeeper], JoinAddress]]:
    """Starts servers with a given doorkeeper, and stops them at the end."""
    servers: list[FlightServer] = []

    def start(doorkeeper: Doorkeeper) -> JoinAddress:
        servers.append(FlightServer(Recorder(), "127.0.0.1:0", token="tok", doorkeeper=lambda: doorkeeper))
        servers[-1].start()
        return servers[-1].join_address("run")

    yield start
    for server in servers:
        server.stop()


@pytest.mark.seconds
@pytest.mark.parametrize("hold", [wire.idle_sockets, wire.unfinished_handshakes])
def test_connections_without_a_call_are_closed_and_those_of_learners_stay(
    serve: Callable[[Doorkeeper], JoinAddress], hold: Held
) -> None:
    address = serve(Doorkeeper(handshake_s=0.3))
    learner = FlightConnection(address)
    learner.status()
    before = {c.laddr.port for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == address.port}
    with hold(address, 5) as lines:
        assert all(map(has_ended, lines))
    after = {c.laddr.port for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == address.port}
    assert before & after, "the learner's own connection was ended"
    assert learner.status() == {"status": "running"}


def test_too_many_unknown_connections_close_the_oldest_one(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    address = serve(Doorkeeper(max_strangers=3, handshake_s=3600.0))
    with wire.idle_sockets(address, 8) as lines:
        assert all(map(has_ended, lines[:5]))
        newcomer = FlightConnection(address)
        assert newcomer.status() == {"status": "running"}


@pytest.mark.seconds
def test_an_upload_that_stops_is_ended_and_its_memory_is_freed(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    address = serve(Doorkeeper(silent_s=0.3))
    began_s = time.monotonic()
    wire.upload_that_stops(address, num_bytes=64 * MIB)
    assert time.monotonic() - began_s < WAIT_S, "it lasted as long as its sender liked"


@pytest.mark.seconds
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell when the last byte came")
def test_an_upload_over_a_slow_link_continues(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    address = serve(Doorkeeper(silent_s=0.3))
    with FaultProxy(address.host_port, rate_bps=8 * 2 * MIB) as proxy:
        host, port = split_host_port(proxy.address)
        learner = FlightConnection(replace(address, host=host, port=port))
        learner.status()
        payload = memoryview(bytes(2 * MIB))
        assert learner.put(Bulk({}, payload), deadline_s=WAIT_S) is not None


def test_compressed_batches_are_refused_before_they_are_inflated(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    address = serve(Doorkeeper())
    memory, before = psutil.Process().memory_info, psutil.Process().memory_info().rss
    refusal = wire.compressed_upload(address, num_bytes=256 * MIB)
    assert "columns" in refusal
    assert memory().rss - before < 64 * MIB


def test_no_answer_contains_a_path_of_the_syncer(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    answers = wire.odd_calls(serve(Doorkeeper()))
    assert len(answers) == 8
    assert not [answer for answer in answers if str(Path(lightning_diloco.__file__).parent) in answer]


# --- with a token: messages


def nested(levels: int) -> object:
    value: object = "deep"
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SyncerService]:
    made = SyncerService(SyncerOptions(run_dir=tmp_path), run="run", durable=SyncerStore(tmp_path))
    made.start()
    yield made
    made.stop()


LIES = {
    "nested": {"asked": nested(20)},
    "huge shape": {"shapes": {"a": [2**31, 2**31]}},
    "many fragments": {"num_fragments": 30_000_000, "config": {"sync_every": 30_000_000, "num_fragments": 30_000_000}},
    "many slices": {"shapes": {"a": [2**40, 1]}, "config": {**OPTIONS, "max_slice_numel": 1}},
    "much dealing": {
        "shapes": {f"p{n}": [2, n + 1] for n in range(5000)},
        "num_fragments": 4096,
        "config": {"sync_every": 4096, "num_fragments": 4096},
    },
    "empty shape": {"shapes": {"a": [0]}},
    "long name": {"frozen": {"x" * 2000: "digest"}},
    "no table": {"shapes": 3},
    "nothing": {"mean_names": ["nobody"]},
}


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_an_impossible_seed_is_refused_and_the_next_learner_seeds(
    service: SyncerService, lies: dict[str, object]
) -> None:
    transport = MemoryTransport(service)
    mallory, honest = Peer(transport.connect(), "mallory"), Honest(transport.connect())
    mallory.say(wire.hello(mallory))
    honest.say(wire.hello(honest))  # waits for the other learner's seed
    began_s = time.monotonic()
    wire.lying_seed(mallory, **lies)
    honest.join()
    honest.train()
    assert time.monotonic() - began_s < WAIT_S
    assert service.error is None
    honest.leave()


def test_deeply_nested_json_is_refused(service: SyncerService) -> None:
    mallory = Peer(MemoryTransport(service).connect(), "mallory")
    with pytest.raises(CorruptMessageError, match="levels"):
        mallory.connection.send(mallory.session, [{"kind": "SeedPlan", "lease": 1, "manifest": nested(700)}])


def test_a_flood_delays_only_its_sender(service: SyncerService) -> None:
    transport, may_go_on = MemoryTransport(service), threading.Event()
    honest, mallory = Honest(transport.connect()), Peer(transport.connect(), "mallory")
    honest.join()
    mallory.join()
    handle = service.state.handle
    service.state.handle = lambda *event: may_go_on.wait(WAIT_S) and handle(*event)  # type: ignore[method-assign]
    assert wire.flood(mallory, num_calls=50) >= 50 - inbox.MAX_OWN / 50 - 1
    honest.say(messages.AskFate(0, 0))  # is taken although the other one's were not
    may_go_on.set()
    honest.hear(messages.FateIs)
    with ThreadPoolExecutor(1) as flooder:
        flooding = flooder.submit(wire.flood, mallory, num_calls=200)
        honest.train()
        flooding.result()
    honest.leave()


def test_invented_sessions_do_not_take_the_place_of_a_learner(
    service: SyncerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_SESSIONS", 10)
    transport = MemoryTransport(service)
    honest = Honest(transport.connect())
    honest.join()
    honest.say(messages.AskFate(0, 0))
    wire.made_up_sessions(Peer(transport.connect(), "mallory"), 30)
    honest.hear(messages.FateIs, fragment=0, seq=0)
    honest.train()
    honest.leave()


def test_the_name_of_a_joining_learner_is_reserved(service: SyncerService) -> None:
    transport = MemoryTransport(service)
    honest = Honest(transport.connect())
    honest.join()
    joining, mallory = (Peer(transport.connect(), "joining") for _ in range(2))
    joining.say(wire.hello(joining))
    joining.hear(messages.Welcome)
    service.state.roster[joining.session].heard_s -= 5.0  # adopts, and has nothing to say
    mallory.say(wire.hello(mallory))
    honest.say(messages.AskFate(0, 0))
    honest.hear(messages.FateIs)
    assert [m.session for m in service.state.roster.members.values() if m.learner == "joining"] == [joining.session]
    honest.leave()


# --- without a token: a syncer as it is started


def limited_syncer(processes: Processes, max_files: int) -> psutil.Process:
    """`diloco syncer` under `ulimit -n`, soft and hard."""
    command = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({max_files},) * 2);"
        f"from lightning_diloco.cli.main import main; main(['syncer', '--run-dir', {str(processes.run_dir)!r}])"
    )
    started = processes.start("syncer", "-c", command)
    until((processes.run_dir / "join").exists, "the join file", processes)
    return psutil.Process(started.pid)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads sizes as Linux tells them")
def test_strangers_do_not_fill_a_syncer_or_block_new_learners(processes: Processes) -> None:
    syncer = limited_syncer(processes, FEW_FILES)
    address = processes.address
    honest = Honest(FlightConnection(address))
    honest.join()
    honest.train()
    before = syncer.memory_info().rss
    wire.large_calls(address)
    assert syncer.memory_info().rss - before < 16 * MIB
    for number, hold in enumerate((wire.idle_sockets, wire.unfinished_handshakes, wire.unfinished_calls)):
        with hold(address, FEW_FILES + 150):
            newcomer = Honest(FlightConnection(address), f"newcomer{number}")
            newcomer.join()
            newcomer.leave()
            honest.train()
    until(lambda: syncer.memory_info().rss < 1.1 * before, "memory to be returned", processes)
    assert "Handshake failed" not in processes.logs()
    honest.leave()
