"""Tests of Flight only: damaged bytes, bytes at the socket, and start and stop of a server."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pyarrow as pa
import pytest
from pyarrow import flight

from lightning_diloco.errors import CorruptMessageError, LocalError, TransportError
from lightning_diloco.transport import flight_client, frames
from lightning_diloco.transport.faults import FaultProxy
from lightning_diloco.transport.flight import FlightServer
from tests.transport.conftest import MIB, bulk, every_call, raw_client

# --- damaged bytes


def test_a_damaged_upload_is_refused_before_the_handler(serve, dial, handler, monkeypatch):
    connection = dial(serve().join_address("run"))
    honest = frames.Envelope.of
    monkeypatch.setattr(frames.Envelope, "of", lambda b: replace(honest(b), crc32=honest(b).crc32 ^ 1))
    with pytest.raises(CorruptMessageError, match="checksum"):
        connection.put(bulk(5 * MIB), deadline_s=5)
    assert not handler.entered.is_set()


def test_a_damaged_download_is_refused(serve, dial, monkeypatch):
    connection = dial(serve().join_address("run"))
    connection.put(bulk(5 * MIB), deadline_s=5)
    honest = frames.Envelope.of
    monkeypatch.setattr(frames.Envelope, "of", lambda b: replace(honest(b), crc32=honest(b).crc32 ^ 1))
    with pytest.raises(CorruptMessageError, match="checksum"):
        connection.get({}, deadline_s=5)


def test_a_truncated_upload_is_refused(serve, dial, handler, monkeypatch):
    monkeypatch.setattr(flight_client, "to_slices", lambda payload: list(frames.to_slices(payload))[:-1])
    with pytest.raises(CorruptMessageError, match="only"):
        dial(serve().join_address("run")).put(bulk(5 * MIB), deadline_s=5)
    assert not handler.entered.is_set()


def test_an_oversized_upload_is_refused_before_memory_is_reserved(serve, dial, handler, monkeypatch):
    connection = dial(serve(max_payload_bytes=MIB).join_address("run"))
    monkeypatch.setattr(pa, "allocate_buffer", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(CorruptMessageError, match=f"{20 * MIB} bytes was declared; a call takes at most {MIB}"):
        connection.put(bulk(20 * MIB), deadline_s=5)
    assert not handler.entered.is_set()


def test_an_oversized_download_is_refused(serve, dial):
    address = serve().join_address("run")
    dial(address).put(bulk(2 * MIB), deadline_s=5)
    with pytest.raises(CorruptMessageError, match="at most"):
        dial(address, max_payload_bytes=MIB).get({}, deadline_s=5)


def test_uploads_beyond_the_total_memory_wait_for_each_other(serve, dial, handler, pool):
    connection = dial(serve(max_payload_bytes=4 * MIB, max_inflight_bytes=4 * MIB).join_address("run"))
    held, most = [], []
    on_put = handler.on_put

    def watched(b):
        held.append(1)
        most.append(len(held))
        answer = on_put(b)
        held.pop()
        return answer

    handler.on_put = watched
    answers = list(pool.map(lambda _: connection.put(bulk(3 * MIB), deadline_s=10), range(6)))
    assert answers == [{"got": 3 * MIB}] * 6
    assert set(most) == {1}


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"session":1,"messages":[]}', b'{"session":"s","messages":[1]}'])
def test_a_malformed_message_is_refused_before_the_handler(serve, handler, body):
    server = serve()
    with raw_client(server.join_address("run")) as client:
        options = flight.FlightCallOptions(
            headers=[(b"authorization", f"Bearer {server.join_address('r').token}".encode())]
        )
        with pytest.raises(flight.FlightServerError, match="CorruptMessageError"):
            list(client.do_action(flight.Action("send", body), options))
    assert not handler.entered.is_set()


# --- lines and servers


@pytest.mark.seconds
def test_simultaneous_calls_have_separate_tcp_connections_which_are_used_again(serve, dial, handler, pool):
    server = serve()
    with FaultProxy(server.address) as proxy:
        connection = dial(server.join_address("run"), through=proxy)
        assert proxy.num_connections == 0
        for call in every_call(connection):
            call()
        assert proxy.num_connections == 1 + 1  # the first one checked the certificate
        handler.entered.clear()
        waiting = pool.submit(connection.poll, "s", 0, 1.0)
        assert handler.entered.wait(5)
        for call in every_call(connection):
            call()
        waiting.result(5)
        assert proxy.num_connections == 1 + 2


def test_a_connection_that_was_idle_for_a_long_time_is_not_used_again(serve, dial, monkeypatch):
    server = serve()
    with FaultProxy(server.address) as proxy:
        connection = dial(server.join_address("run"), through=proxy)
        connection.status()
        monkeypatch.setattr(flight_client, "IDLE_S", 0.0)
        connection.status()
        assert proxy.num_connections == 1 + 2


def test_bytes_at_the_socket_are_little_more_than_the_payload(serve, dial, identity):
    server = serve(tls=identity)
    with FaultProxy(server.address) as proxy:
        dial(server.join_address("run"), through=proxy).put(bulk(8 * MIB), deadline_s=10)
        assert 8 * MIB < proxy.bytes_up < 8.1 * MIB
        assert proxy.bytes_down < 0.1 * MIB


def test_stop_is_quick_although_a_poll_waits_and_may_be_repeated(serve, dial, handler, pool):
    server = serve()
    waiting = pool.submit(dial(server.join_address("run")).poll, "s", 0, 30.0)
    assert handler.entered.wait(5)
    began_s = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - began_s < 1.5
    with pytest.raises(TransportError):
        waiting.result(5)


def test_a_connection_may_be_closed_while_a_call_begins(serve, dial, monkeypatch, pool):
    """Closing the client would free gRPC's stub, and the call would crash the process."""
    connection, begins, closed = dial(serve().join_address("run")), threading.Event(), threading.Event()
    connection.status()
    find_client = connection._client

    def find_and_wait(*arguments):
        client = find_client(*arguments)
        begins.set()
        assert closed.wait(5)
        return client

    monkeypatch.setattr(connection, "_client", find_and_wait)
    answer = pool.submit(connection.status)
    assert begins.wait(5)
    connection.close()
    closed.set()
    assert answer.result(5) == {"status": "running"}
    with pytest.raises(TransportError, match="is closed"):
        connection.status()


def test_a_port_in_use_is_a_transport_error(serve, handler, capfd):
    taken = serve().address
    with pytest.raises(TransportError, match=r"cannot listen on .* \(Address already in use\)"):
        FlightServer(handler, taken, token="tok").start()
    assert capfd.readouterr() == ("", ""), "gRPC logs nothing"


def test_an_address_is_known_only_after_start(handler):
    with pytest.raises(LocalError, match="start"):
        _ = FlightServer(handler, "127.0.0.1:0", token="tok").address
