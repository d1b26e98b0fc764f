"""Attacks on a syncer's address, without the token or with it. The tests state the expected effects."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import torch
from pyarrow import flight

from lightning_diloco.config import PROTOCOL_VERSION
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.errors import DiLoCoError
from lightning_diloco.manifest import make_manifest
from lightning_diloco.protocol import messages
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk
from lightning_diloco.transport.frames import SCHEMA, Envelope
from lightning_diloco.transport.identity import HOSTNAME
from tests.fuzz.target import MODEL, OPTIONS, Peer
from tests.transport.conftest import raw_client

CALL_S = 10.0


def large_calls(address: JoinAddress, *, num: int = 4, num_bytes: int = 200 << 20, token: str = "guess") -> None:
    """Send large calls at the same time, with a wrong token."""

    def call() -> None:
        options = flight.FlightCallOptions(timeout=CALL_S, headers=[(b"authorization", b"Bearer " + token.encode())])
        with contextlib.suppress(flight.FlightError, pa.ArrowException), stranger(address, token) as client:
            list(client.do_action(flight.Action("send", b" " * num_bytes), options))

    with ThreadPoolExecutor(num) as callers:
        for _ in range(num):
            callers.submit(call)


@contextlib.contextmanager
def idle_sockets(address: JoinAddress, num: int) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_connected(address)) for _ in range(num)]


@contextlib.contextmanager
def unfinished_handshakes(address: JoinAddress, num: int) -> Iterator[list[socket.socket]]:
    """Open connections whose TLS handshake stops."""
    with idle_sockets(address, num) as lines:
        for line in lines:
            with contextlib.suppress(OSError):
                line.sendall(_client_hello())
        yield lines


@contextlib.contextmanager
def unfinished_calls(address: JoinAddress, num: int, token: str = "guess") -> Iterator[list[ssl.SSLSocket]]:
    """Open HTTP/2 connections with a wrong token that announce a large frame and send a part of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    with idle_sockets(address, num) as lines, contextlib.ExitStack() as stack:
        secured = []
        for line in lines:
            with contextlib.suppress(OSError):
                secured.append(stack.enter_context(context.wrap_socket(line)))
                secured[-1].sendall(preface + b"\0\x40\0\0\0\0\0\0\1" + b"x" * 10_000)
        yield secured


def upload_that_stops(address: JoinAddress, *, num_bytes: int) -> None:
    """Start an upload with the token that declares this size and sends nothing; return when it has ended."""
    envelope = Envelope({"session": "stranger"}, num_bytes, 0)
    descriptor = flight.FlightDescriptor.for_command(envelope.encode())
    with stranger(address, address.token) as client:
        writer, answers = client.do_put(descriptor, SCHEMA, _with_token(address, deadline_s=10 * CALL_S))
        with contextlib.suppress(flight.FlightError, pa.ArrowException), writer:
            answers.read()


def compressed_upload(address: JoinAddress, *, num_bytes: int) -> str:
    """Send a compressed batch of zeros with the token; return the refusal."""
    schema = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
    zeros = pa.Array.from_buffers(pa.uint8(), num_bytes, [None, pa.py_buffer(bytes(num_bytes))])
    options = _with_token(address, write_options=pa.ipc.IpcWriteOptions(compression="zstd"))
    descriptor = flight.FlightDescriptor.for_command(Envelope({"session": "stranger"}, 0, 0).encode())
    with stranger(address, address.token) as client:
        try:
            writer, answers = client.do_put(descriptor, schema, options)
            with writer:
                writer.write_batch(pa.record_batch([zeros], schema=schema))
                writer.done_writing()
                answers.read()
        except flight.FlightError as error:
            return f"{error} {(error.extra_info or b'').decode()}"
    return ""


def _with_token(address: JoinAddress, *, deadline_s: float = CALL_S, **options: object) -> flight.FlightCallOptions:
    headers = [(b"authorization", f"Bearer {address.token}".encode())]
    return flight.FlightCallOptions(timeout=deadline_s, headers=headers, **options)


def stranger(address: JoinAddress, token: str) -> flight.FlightClient:
    """Return a client with this token that trusts the syncer's certificate."""
    return raw_client(replace(address, token=token))


def _connected(address: JoinAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=CALL_S)


def _client_hello() -> bytes:
    """Return the beginning of a handshake, without its last byte."""
    said = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname=HOSTNAME).do_handshake()
    return said.read()[:-1]


def odd_calls(address: JoinAddress) -> list[str]:
    """Make calls that no learner makes, with the token; return all answers."""
    options, path = _with_token(address), flight.FlightDescriptor.for_path("odd")

    def put(client: flight.FlightClient) -> None:
        writer, answers = client.do_put(path, SCHEMA, options)
        with writer:
            answers.read()

    calls = (
        put,
        lambda client: list(client.list_flights(options=options)),
        lambda client: client.get_flight_info(path, options),
        lambda client: client.get_schema(path, options),
        lambda client: client.do_exchange(path, options)[1].read_all(),
        lambda client: list(client.list_actions(options)),
        lambda client: list(client.do_action(flight.Action("status", b"\xff"), options)),
        lambda client: client.do_get(flight.Ticket(b"\xff"), options).read_all(),
    )
    answered = []
    with stranger(address, address.token) as client:
        for call in calls:
            try:
                call(client)
            except (flight.FlightError, pa.ArrowException) as error:
                answered.append(f"{error} {getattr(error, 'extra_info', None)!r}")
    return answered


# --- with a token: messages


def lying_seed(peer: Peer, **lies: object) -> messages.Rejected:
    """Send a false manifest as the first learner of a run, then try to continue; return the refusal."""
    peer.say(hello(peer))
    grant = peer.hear(messages.SeedGrant, hello(peer))
    manifest, plan = make_manifest(MODEL, {**grant.options, **OPTIONS})
    for p in range(plan.num_fragments):
        header = {"what": "seed", "session": peer.session, "lease": grant.lease, "fragment": p}
        values = torch.zeros(plan.layout(p, 16).padded_numel)
        peer.connection.put(Bulk(header, bytes_of(values)), deadline_s=CALL_S)
    said = messages.SeedPlan(grant.lease, {**manifest, **lies})
    peer.say(said)
    return peer.hear(messages.Rejected, said)


def flood(peer: Peer, *, num_calls: int, num_at_once: int = 50) -> int:
    """Send more messages than the syncer can process; return the number of refused calls."""
    num_refused, said = 0, [messages.encode(messages.AskFate(0, 1))] * num_at_once
    for _ in range(num_calls):
        try:
            peer.connection.send(peer.session, said)
        except DiLoCoError:
            num_refused += 1
    return num_refused


def made_up_sessions(peer: Peer, num: int) -> None:
    """Send hellos and polls of processes that do not exist."""
    for number in range(num):
        with contextlib.suppress(DiLoCoError):
            said = messages.Hello(f"nobody{number}", 1, PROTOCOL_VERSION + 1, {})
            peer.connection.send(f"{peer.session}{number}", [messages.encode(said)])
            peer.connection.poll(f"{peer.session}-{number}", 0, 0.0)


def hello(peer: Peer) -> messages.Hello:
    return messages.Hello(peer.learner, 1, PROTOCOL_VERSION, {})
