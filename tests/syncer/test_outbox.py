"""Messages wait until they are polled, and cursors of an earlier syncer process are recognized."""

from __future__ import annotations

import threading

import pytest

from lightning_diloco.syncer import outbox
from lightning_diloco.syncer.outbox import Outbox
from lightning_diloco.transport.base import RESET


def joined(box: Outbox, session: str = "s") -> int:
    """Make a first poll, whose cursor never fits; return the next cursor."""
    polled = box.poll(session, 0, 0.0)
    assert polled.messages == (RESET,)
    return polled.cursor


def test_messages_are_returned_in_order_until_they_are_acknowledged() -> None:
    box = Outbox()
    cursor = joined(box)
    box.put("s", {"n": 1})
    box.put("s", {"n": 2})
    first = box.poll("s", cursor, 0.0)
    assert first.messages == ({"n": 1}, {"n": 2})
    assert box.poll("s", cursor, 0.0) == first, "an answer that got lost is given again"
    assert box.poll("s", first.cursor, 0.0).messages == ()


def test_sessions_do_not_receive_messages_of_others() -> None:
    box = Outbox()
    cursor = joined(box, "a")
    box.put("b", {"n": 1})
    assert box.poll("a", cursor, 0.0).messages == ()


def test_a_message_wakes_only_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    waiting, taken = threading.Semaphore(0), threading.Semaphore(0)

    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if (name := threading.current_thread().name) in "ab":  # starting a thread waits, too
                waits.append(name)
                waiting.release()
            return super().wait(timeout)

    monkeypatch.setattr(outbox.threading, "Condition", Watched)
    box = Outbox()
    cursors = {name: joined(box, name) for name in "ab"}

    def poll(name: str) -> None:
        box.poll(name, cursors[name], 60.0)
        taken.release()

    threads = [threading.Thread(target=poll, args=(name,), name=name) for name in "ab"]
    for thread in threads:
        thread.start()
        waiting.acquire()
    for name in "ba":
        box.put(name, {"n": 1})
        taken.acquire()
    for thread in threads:
        thread.join()
    assert waits == ["a", "b"], "a poll that wakes up for another session waits again"


def test_waiting_poll_returns_with_the_message() -> None:
    box, answers = Outbox(), []
    cursor = joined(box)
    thread = threading.Thread(target=lambda: answers.append(box.poll("s", cursor, 10.0)))
    thread.start()
    box.put("s", {"n": 1})
    thread.join(5.0)
    assert answers[0].messages == ({"n": 1},)


def test_waiting_poll_returns_when_the_outbox_closes() -> None:
    box = Outbox()
    cursor = joined(box)
    thread = threading.Thread(target=lambda: box.poll("s", cursor, 60.0))
    thread.start()
    box.close()
    thread.join(5.0)
    assert not thread.is_alive()


def test_cursor_of_another_syncer_process_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Outbox()
    cursor = joined(before)
    before.put("s", {"n": 1})
    cursor = before.poll("s", cursor, 0.0).cursor
    after = Outbox()
    after.put("s", {"n": 2})
    reset = after.poll("s", cursor, 0.0)
    assert reset.messages == (RESET,)
    assert after.poll("s", reset.cursor, 0.0).messages == ({"n": 2},)


def test_unpolled_messages_are_bounded_and_their_loss_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING", 3)
    box = Outbox()
    cursor = joined(box)
    for n in range(5):
        box.put("s", {"n": n})
    reset = box.poll("s", cursor, 0.0)
    assert reset.messages == (RESET,)
    assert [message["n"] for message in box.poll("s", reset.cursor, 0.0).messages] == [2, 3, 4]


def test_invented_sessions_take_bounded_memory_and_a_dropped_session_gets_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "MAX_SESSIONS", 10)
    box = Outbox()
    cursor = joined(box)
    box.put("s", {"n": 1})
    for number in range(30):
        box.put(f"made up {number}", {"n": number})
        box.poll(f"polled {number}", 0, 0.0)
    assert len(box._queues) == 10
    box.put("s", {"n": 2})
    box.put("s", {"n": 3})
    assert box.poll("s", cursor, 0.0).messages == (RESET,)


def test_a_session_that_polls_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_SESSIONS", 10)
    box = Outbox()
    cursor = joined(box)
    for number in range(30):
        box.put(f"made up {number}", {"n": number})
        assert box.poll("s", cursor, 0.0).messages == ()
    box.put("s", {"n": 1})
    assert box.poll("s", cursor, 0.0).messages == ({"n": 1},)


def test_a_new_session_gets_a_queue_although_all_others_are_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_SESSIONS", 2)
    box = Outbox(lambda session: session != "new")
    for session in ("a", "b", "new"):
        box.put(session, {"text": session})
    cursor = box.poll("new", 0, 0.0).cursor
    assert box.poll("new", cursor, 0.0).messages == ({"text": "new"},)
