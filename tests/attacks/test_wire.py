"""What is sent to a syncer's address hurts nobody but the sender; the attacks are in `wire`."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import psutil
import pytest

from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.doorkeeper import Doorkeeper
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from tests.attacks import wire
from tests.e2e.conftest import Processes, until
from tests.fuzz.target import Honest
from tests.transport.conftest import Recorder

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
    """Starts servers with a doorkeeper of one's own, and stops them at the end."""
    servers: list[FlightServer] = []

    def start(doorkeeper: Doorkeeper) -> JoinAddress:
        servers.append(FlightServer(Recorder(), "127.0.0.1:0", token="tok", doorkeeper=lambda: doorkeeper))
        servers[-1].start()
        return servers[-1].join_address("run")

    yield start
    for server in servers:
        server.stop()


@pytest.mark.parametrize("hold", [wire.idle_sockets, wire.unfinished_handshakes])
def test_connections_that_ask_for_nothing_end_and_those_of_learners_stay(
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


def test_beyond_the_number_of_strangers_the_oldest_has_to_go(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    address = serve(Doorkeeper(max_strangers=3, handshake_s=3600.0))
    with wire.idle_sockets(address, 8) as lines:
        assert all(map(has_ended, lines[:5]))
        newcomer = FlightConnection(address)
        assert newcomer.status() == {"status": "running"}


def test_an_upload_that_stops_ends_and_its_memory_is_free_again(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    address = serve(Doorkeeper(silent_s=0.3))
    began_s = time.monotonic()
    wire.upload_that_stops(address, num_bytes=64 * MIB)
    assert time.monotonic() - began_s < WAIT_S, "it lasted as long as its sender liked"


def test_compressed_batches_are_refused_before_they_are_inflated(serve: Callable[[Doorkeeper], JoinAddress]) -> None:
    address = serve(Doorkeeper())
    memory, before = psutil.Process().memory_info, psutil.Process().memory_info().rss
    refusal = wire.compressed_upload(address, num_bytes=256 * MIB)
    assert "columns" in refusal
    assert memory().rss - before < 64 * MIB


# --- without a token: a syncer as it is started


@pytest.fixture
def processes(tmp_path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.kill_all()


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
def test_strangers_neither_fill_a_syncer_nor_shut_newcomers_out(processes: Processes) -> None:
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
    assert syncer.memory_info().rss - before < 100 * MIB
    assert "Handshake failed" not in processes.logs()
    honest.leave()
