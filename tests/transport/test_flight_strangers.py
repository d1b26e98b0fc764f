"""Callers without the token, and syncers without the pinned certificate, are refused before any data is read."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from pyarrow import flight

from lightning_diloco.errors import AuthError, TransportError
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.flight import FlightServer
from lightning_diloco.transport.identity import ServerIdentity
from tests.transport.conftest import every_call, raw_client


def test_a_wrong_token_is_an_auth_error_on_every_call(served, dial, handler):
    address = served.join_address("run")
    for call in every_call(dial(replace(address, token="stolen-guess"))):
        with pytest.raises(AuthError, match="refused the token") as caught:
            call()
        assert not isinstance(caught.value.__cause__, flight.FlightError), "Arrow's own traceback would be read first"
    assert not handler.entered.is_set()


def test_a_call_without_a_token_is_refused_even_if_the_handshake_was_passed(serve, handler):
    with (
        raw_client(serve().join_address("run")) as client,
        pytest.raises(flight.FlightUnauthenticatedError),
    ):
        list(client.do_action(flight.Action("status", b"{}")))
    assert not handler.entered.is_set()


def test_a_certificate_that_is_not_the_pinned_one_is_an_auth_error_with_both_hashes(serve, dial, identity, handler):
    address = serve(tls=identity).join_address("run")
    for call in every_call(dial(replace(address, fingerprint="0" * 64))):
        with pytest.raises(AuthError) as caught:
            call()
        assert identity.fingerprint in str(caught.value)
        assert "0" * 64 in str(caught.value)
    assert not handler.entered.is_set()


def test_a_certificate_that_changes_during_a_connection_is_an_auth_error(handler, dial, identity, eventually):
    first = FlightServer(handler, "127.0.0.1:0", token="tok", tls=identity)
    first.start()
    connection = dial(first.join_address("run"))
    connection.status()
    first.stop()
    handler.entered.clear()
    with FlightServer(handler, first.address, token="tok", tls=ServerIdentity.create()):

        def refused() -> None:
            with pytest.raises(AuthError, match=identity.fingerprint):
                connection.status()

        eventually(refused)
    assert not handler.entered.is_set()


def test_a_listener_without_tls_never_receives_the_token_of_a_pinned_address(dial):
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(1) as impostor:

        def heard() -> bytes:
            line, _ = taken.accept()
            with line:
                said = line.recv(1 << 16)
                line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                return said

        said = impostor.submit(heard)
        address = JoinAddress("127.0.0.1", taken.getsockname()[1], "run", "sesame", "0" * 64)
        with pytest.raises(TransportError, match="no certificate"):
            dial(address).status()
        assert b"sesame" not in said.result()


def test_the_token_is_in_no_error_repr_or_log(serve, dial, handler, caplog, identity):
    caplog.set_level(logging.DEBUG)
    server = serve(tls=identity)
    address = server.join_address("run")
    texts = [repr(server), repr(address), repr(dial(address))]
    handler.error = ValueError("boom")
    wrong = dial(replace(address, token="stolen-guess"))
    calls = [*every_call(dial(address)), *every_call(wrong)]
    for call in calls:
        with pytest.raises((TransportError, AuthError)) as caught:
            call()
        texts.append(repr(caught.value))
    assert "internal error at the syncer" in caplog.text
    assert not [text for text in [*texts, caplog.text] if address.token in text or "stolen-guess" in text]


def test_all_interfaces_with_tls_are_served(handler, dial, identity):
    with FlightServer(handler, "0.0.0.0:0", token="tok", tls=identity) as server:
        assert dial(server.join_address("run", host="localhost")).status() == {"status": "running"}


def test_ipv6_is_served(handler, dial, identity):
    server = FlightServer(handler, "[::1]:0", token="tok", tls=identity)
    try:
        server.start()
    except TransportError:
        pytest.skip("no IPv6 loopback here")
    assert dial(server.join_address("run")).status() == {"status": "running"}
    server.stop()
