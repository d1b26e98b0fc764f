"""A recording handler, and the transports to it."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
from pyarrow import flight

from lightning_diloco.transport.address import JoinAddress, split_host_port
from lightning_diloco.transport.base import Bulk, Connection, Json, Polled
from lightning_diloco.transport.faults import FaultProxy
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from lightning_diloco.transport.identity import HOSTNAME, ServerIdentity
from lightning_diloco.transport.token_identity import learner_certificate
from tests.transport.memory import MemoryTransport

TOKEN = "a-token-nobody-should-see"
MIB = 1 << 20


def bulk(num_bytes: int = 0) -> Bulk:
    return Bulk({}, memoryview(bytes(num_bytes)))


def every_call(connection: Connection) -> Iterator[Callable[[], object]]:
    yield lambda: connection.send("s", [{}])
    yield lambda: connection.poll("s", 0, 0.0)
    yield connection.status
    yield lambda: connection.put(bulk(MIB), deadline_s=5)
    yield lambda: connection.get({}, deadline_s=5)


def raw_client(address: JoinAddress) -> flight.FlightClient:
    """Return a raw Flight client that passes the handshake."""
    certificate, key = learner_certificate(address.token)
    return flight.FlightClient(
        f"grpc+tls://{address.host_port}",
        tls_root_certs=ssl.get_server_certificate((address.host, address.port)).encode(),
        cert_chain=certificate,
        private_key=key,
        override_hostname=HOSTNAME,
        generic_options=[("grpc.use_local_subchannel_pool", 1)],
    )


class Recorder:
    """A handler that records its calls, has one outbox for all sessions, and raises `error` if it is set."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Json]] = []
        self.puts: list[Bulk] = []
        self.outbox: list[Json] = []
        self.error: Exception | None = None
        self.answer: object = None
        self.entered = threading.Event()
        self.posted = threading.Condition()

    def post(self, message: Json) -> None:
        with self.posted:
            self.outbox.append(message)
            self.posted.notify_all()

    def on_send(self, session: str, messages: Sequence[Json]) -> Json:
        self._enter()
        self.sent += [(session, message) for message in messages]
        return {"taken": len(messages)} if self.answer is None else self.answer

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        self._enter()
        with self.posted:
            self.posted.wait_for(lambda: len(self.outbox) > cursor, wait_s)
            return Polled(len(self.outbox), tuple(self.outbox[cursor:]))

    def on_put(self, bulk: Bulk) -> Json:
        self._enter()
        self.puts.append(bulk)
        return {"got": bulk.payload.nbytes}

    def on_get(self, header: Json) -> Bulk:
        self._enter()
        return Bulk({"asked": header}, self.puts[-1].payload)

    def on_status(self) -> Json:
        self._enter()
        return {"status": "running"}

    def _enter(self) -> None:
        self.entered.set()
        if self.error is not None:
            raise self.error


@dataclass
class Reached:
    """A connection to a recorder, and the errors reported there."""

    connection: Connection
    handler: Recorder
    reported: list[Exception] = field(default_factory=list)


@pytest.fixture
def handler() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def identity() -> ServerIdentity:
    return ServerIdentity.create()


@pytest.fixture(params=["memory", "flight"])
def reached(request: pytest.FixtureRequest, handler: Recorder) -> Iterator[Reached]:
    """Yield a connection over every transport, because all must behave alike."""
    reported: list[Exception] = []
    if request.param == "memory":
        yield Reached(MemoryTransport(handler, on_error=reported.append).connect(), handler, reported)
        return
    with FlightServer(handler, "127.0.0.1:0", token=TOKEN, on_error=reported.append) as server:
        connection = FlightConnection(server.join_address("run"))
        yield Reached(connection, handler, reported)
        connection.close()


@pytest.fixture
def serve(handler: Recorder) -> Iterator[Callable[..., FlightServer]]:
    """Starts servers and stops them at the end."""
    servers: list[FlightServer] = []

    def start(**options: object) -> FlightServer:
        servers.append(FlightServer(handler, "127.0.0.1:0", **{"token": TOKEN, **options}))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def served(serve: Callable[..., FlightServer]) -> FlightServer:
    return serve()


@pytest.fixture
def dial() -> Iterator[Callable[..., FlightConnection]]:
    """Makes connections and closes them at the end."""
    connections: list[FlightConnection] = []

    def connect(address: JoinAddress, through: FaultProxy | None = None, **options: object) -> FlightConnection:
        if through is not None:
            address = replace(address, port=split_host_port(through.address)[1])
        connections.append(FlightConnection(address, **options))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], object]:
    """Repeats a call until it does not raise, for 5 s at most; returns its result."""

    def repeat(call: Callable[[], object]) -> object:
        ends_s = time.monotonic() + 5.0
        while True:
            try:
                return call()
            except Exception:
                if time.monotonic() > ends_s:
                    raise

    return repeat
