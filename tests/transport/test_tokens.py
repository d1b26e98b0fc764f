"""Any value other than the token is refused, and the time of the refusal reveals nothing."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from pyarrow import flight

from lightning_diloco.transport import flight_server
from lightning_diloco.transport.flight import FlightServer
from tests.transport.conftest import TOKEN, raw_client

NEARLY = [TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "", "x" * 5000, "Bearer " + TOKEN, "tök"]


def show(server: FlightServer, *shown: bytes) -> None:
    options = flight.FlightCallOptions(timeout=5.0, headers=[(b"authorization", value) for value in shown])
    with raw_client(server.join_address("run")) as client:
        list(client.do_action(flight.Action("status", b"{}"), options))


@pytest.mark.parametrize("token", NEARLY, ids=lambda token: token[:12] or "empty")
def test_a_wrong_token_is_refused(serve, handler, token):
    with pytest.raises(flight.FlightError):
        show(serve(), b"Bearer " + token.encode())
    assert not handler.entered.is_set()


@pytest.mark.parametrize("scheme", [b"", b"bearer ", b"Basic "])
def test_the_token_under_another_scheme_is_refused(serve, handler, scheme):
    with pytest.raises(flight.FlightUnauthenticatedError):
        show(serve(), scheme + TOKEN.encode())
    assert not handler.entered.is_set()


def test_a_second_header_does_not_help(serve, handler):
    with pytest.raises(flight.FlightUnauthenticatedError):
        show(serve(), b"Bearer wrong", b"Bearer " + TOKEN.encode())
    assert not handler.entered.is_set()


def test_tokens_are_compared_in_constant_time(serve, handler, monkeypatch):
    """Every comparison uses hmac: if its comparison always returns True, any token is accepted."""
    compared: list[Any] = []

    def agreeable(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return True

    assert flight_server.hmac is hmac
    with monkeypatch.context() as lax:
        lax.setattr(flight_server.hmac, "compare_digest", agreeable)
        show(serve(), b"Bearer wrong")
    assert handler.entered.is_set()
    assert compared == [(b"Bearer wrong", b"Bearer " + TOKEN.encode())]
