"""Deferred copies: which thread runs them, which thread waits, and the effect of an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from lightning_diloco.devices.copies import Copies

WAIT_S = 10.0


class Held:
    """A copy that a thread has begun and that ends on request."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)


@pytest.fixture
def aside():
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def noting(made: list[str], name: str) -> Callable[[], None]:
    return lambda: made.append(f"{name} by {threading.current_thread().name}")


def test_settle_without_copies_returns_at_once():
    Copies().settle()


def test_settle_runs_copies_that_no_thread_has_begun_in_order():
    copies, made = Copies(), []
    copies.promise([noting(made, "a"), noting(made, "b")])
    copies.settle()
    copies.settle()  # once is enough
    me = threading.current_thread().name
    assert made == [f"a by {me}", f"b by {me}"]


def test_settle_waits_for_a_copy_of_another_thread_and_runs_the_others(aside):
    copies, held, made = Copies(), Held(), []
    copies.promise([held, lambda: (made.append("b"), held.may_end.set())])
    other = aside(copies.settle)
    assert held.begun.wait(WAIT_S)
    copies.settle()  # returns only because it runs the second copy itself, and not before the first one has ended
    assert made == ["b"]
    other.result(WAIT_S)


@contextmanager
def settling_while_one_is_made(aside):
    """Yield copies, one of which another thread has begun, and a thread that waits for it; then let the copy end."""
    copies, held = Copies(), Held()
    copies.promise([held])
    maker = threading.Thread(target=copies.settle, daemon=True)
    maker.start()
    assert held.begun.wait(WAIT_S)
    waiting = aside(copies.settle)
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    yield copies
    held.may_end.set()
    waiting.result(WAIT_S)
    maker.join(WAIT_S)


def test_settle_does_not_return_while_a_copy_runs(aside):
    with settling_while_one_is_made(aside):
        pass


def test_a_thread_that_waits_for_a_copy_runs_copies_that_are_scheduled_meanwhile(aside):
    """After the last step, the training thread does not settle again."""
    later = threading.Event()
    with settling_while_one_is_made(aside) as copies:
        copies.promise([later.set])
        assert later.wait(WAIT_S)


def test_an_error_is_raised_in_all_threads_and_the_other_copies_run(aside):
    copies, made = Copies(), []

    def fail() -> None:
        raise ValueError("no such row")

    copies.promise([fail, noting(made, "b")])
    for _ in range(2):
        with pytest.raises(ValueError, match="no such row"):
            aside(copies.settle).result(WAIT_S)
    with pytest.raises(ValueError, match="no such row"):
        copies.settle()
    assert len(made) == 1
