"""Tests of the in-memory transport only: it loses requests and answers on demand."""

from __future__ import annotations

import pytest

from lightning_diloco.errors import TransportError
from tests.transport.memory import MemoryTransport


def losing(lost: str):
    def fault(call: str) -> None:
        if call == lost:
            raise TransportError(f"lost: {call}")

    return fault


@pytest.mark.parametrize(("lost", "arrived"), [("send", 0), ("send answer", 1)])
def test_a_lost_call_raises_and_reaches_the_handler_only_if_the_answer_is_lost(handler, lost, arrived):
    connection = MemoryTransport(handler, fault=losing(lost)).connect()
    with pytest.raises(TransportError, match=f"lost: {lost}"):
        connection.send("s", [{}])
    assert len(handler.sent) == arrived


def test_messages_are_copied_so_that_sharing_cannot_hide_a_bug(handler):
    connection = MemoryTransport(handler).connect()
    message = {"list": [1], "pair": (1, 2)}
    connection.send("s", [message])
    message["list"].append(2)
    assert handler.sent == [("s", {"list": [1], "pair": [1, 2]})]
