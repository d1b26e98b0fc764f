"""The contract of all transports, tested with each of them."""

from __future__ import annotations

import threading

import pytest

from lightning_diloco.errors import (
    AuthError,
    CorruptMessageError,
    DiLoCoError,
    FencedError,
    PlanMismatchError,
    StorageError,
    TransportError,
)
from lightning_diloco.transport.base import Bulk

PAYLOADS = {"0 B": b"", "1 B": b"\x07", "5 MiB and a bit": bytes(range(256)) * (5 << 12) + b"end"}


def test_send_delivers_messages_in_order_and_returns_the_answer(reached):
    assert reached.connection.send("s1", [{"n": 1}, {"n": 2, "text": "é\n"}]) == {"taken": 2}
    assert reached.handler.sent == [("s1", {"n": 1}), ("s1", {"n": 2, "text": "é\n"})]


def test_poll_returns_messages_after_the_cursor_in_order(reached):
    for n in range(3):
        reached.handler.post({"n": n})
    polled = reached.connection.poll("s", 1, 0.0)
    assert (polled.cursor, polled.messages) == (3, ({"n": 1}, {"n": 2}))
    again = reached.connection.poll("s", polled.cursor, 0.0)
    assert (again.cursor, again.messages) == (3, ())


def test_poll_repeated_with_the_same_cursor_returns_the_same_messages(reached):
    reached.handler.post({"n": 0})
    assert reached.connection.poll("s", 0, 0.0) == reached.connection.poll("s", 0, 0.0)


def test_a_waiting_poll_wakes_for_a_message_and_delays_no_send(reached, pool):
    waiting = pool.submit(reached.connection.poll, "s", 0, 30.0)
    assert reached.handler.entered.wait(5)
    assert reached.connection.send("s", [{"n": 1}]) == {"taken": 1}
    assert not waiting.done()
    reached.handler.post({"wake": True})
    assert waiting.result(5).messages == ({"wake": True},)


def test_status_returns_the_handlers_answer(reached):
    assert reached.connection.status() == {"status": "running"}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_put_and_get_transfer_header_and_payload_unchanged(reached, payload):
    answer = reached.connection.put(Bulk({"fragment": 3}, memoryview(payload)), deadline_s=10)
    assert answer == {"got": len(payload)}
    assert reached.handler.puts[0].header == {"fragment": 3}
    got = reached.connection.get({"version": [1, 2]}, deadline_s=10)
    assert got.header == {"asked": {"version": [1, 2]}}
    for bulk in (reached.handler.puts[0], got):
        assert bulk.payload == payload
        assert (bulk.payload.format, bulk.payload.readonly, bulk.payload.c_contiguous) == ("B", True, True)


def test_put_copies_so_that_the_sender_may_reuse_its_buffer(reached):
    buffer = bytearray(b"before")
    reached.connection.put(Bulk({}, memoryview(buffer)), deadline_s=10)
    buffer[:] = b"after!"
    assert reached.handler.puts[0].payload == b"before"


def test_many_calls_at_once_each_get_their_own_answer(reached, pool):
    def put_one(n: int) -> object:
        return reached.connection.put(Bulk({}, memoryview(bytes(n))), deadline_s=10)["got"]

    assert list(pool.map(put_one, range(50))) == list(range(50))


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", float("nan"), object()], ids=["set", "bytes", "nan", "object"])
def test_values_that_are_not_json_are_refused_at_the_sender(reached, value):
    with pytest.raises((TypeError, ValueError)):
        reached.connection.send("s", [{"value": value}])
    with pytest.raises((TypeError, ValueError)):
        reached.connection.put(Bulk({"value": value}, memoryview(b"")), deadline_s=10)
    assert not reached.handler.entered.is_set()


def calls(connection):
    return {
        "send": lambda: connection.send("s", [{}]),
        "poll": lambda: connection.poll("s", 0, 0.0),
        "put": lambda: connection.put(Bulk({}, memoryview(bytes(3 << 20))), deadline_s=10),
        "get": lambda: connection.get({}, deadline_s=10),
        "status": connection.status,
    }


@pytest.mark.parametrize("kind", [FencedError, PlanMismatchError, AuthError, CorruptMessageError, StorageError])
def test_an_error_of_this_package_arrives_as_the_same_class_with_the_same_text(reached, kind):
    reached.handler.error = kind("found 1; allowed ä;\n do 2")
    for call in calls(reached.connection).values():
        with pytest.raises(DiLoCoError) as caught:
            call()
        assert type(caught.value) is kind
        assert str(caught.value) == "found 1; allowed ä;\n do 2"
    assert not reached.reported


def test_a_subclass_from_elsewhere_arrives_as_the_class_it_extends(reached):
    class HomeMadeError(FencedError):
        pass

    reached.handler.error = HomeMadeError("mine")
    with pytest.raises(FencedError, match="mine") as caught:
        reached.connection.status()
    assert type(caught.value) is FencedError


def test_a_very_long_error_text_is_shortened_and_keeps_its_class(reached):
    reached.handler.error = FencedError("ä" * 100_000)
    with pytest.raises(FencedError) as caught:
        reached.connection.status()
    assert 500 < len(str(caught.value)) < 2_000
    assert str(caught.value).endswith("ä…")


def test_any_other_exception_is_reported_at_the_handler_and_named_at_the_caller(reached):
    reached.handler.error = KeyError("fragment 9")
    for call in calls(reached.connection).values():
        with pytest.raises(TransportError, match="internal error at the syncer: KeyError; its log says more"):
            call()
    assert reached.reported == [reached.handler.error] * 5


def test_an_answer_that_is_not_json_is_a_reported_error(reached):
    reached.handler.answer = {"tensor": object()}
    with pytest.raises(TransportError, match="internal error at the syncer: TypeError"):
        reached.connection.send("s", [{}])
    assert len(reached.reported) == 1


def test_a_closed_connection_refuses_and_close_may_be_repeated(reached):
    reached.connection.close()
    reached.connection.close()
    for call in calls(reached.connection).values():
        with pytest.raises(TransportError, match="closed"):
            call()


def test_a_send_and_an_upload_pass_each_other_while_a_poll_waits(reached, pool):
    """The upload is held in the handler; control messages still pass."""
    release = threading.Event()
    on_put = reached.handler.on_put
    reached.handler.on_put = lambda bulk: (reached.handler.entered.set(), release.wait(5), on_put(bulk))[-1]
    upload = pool.submit(calls(reached.connection)["put"])
    assert reached.handler.entered.wait(5)
    assert reached.connection.send("s", [{}]) == {"taken": 1}
    release.set()
    assert upload.result(5) == {"got": 3 << 20}
