"""Termination signals are recorded: the first one requests a clean shutdown, a second one an immediate end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lightning_diloco.cli.local.interruption import SAME_S, Interruption


@pytest.fixture
def _terminal() -> Iterator[None]:
    """Undo the effect of nohup, if the tests run under it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Interruption() as interruption:
        assert not interruption
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption
        assert interruption.signal is number
        assert interruption.exit_code == 128 + number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(("after_s", "is_urgent"), [(SAME_S / 2, False), (SAME_S * 2, True)])
def test_a_second_signal_is_urgent_unless_it_repeats_the_first(after_s: float, is_urgent: bool) -> None:
    now_s = 100.0
    with Interruption(lambda: now_s) as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not interruption.is_urgent
        now_s += after_s
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.is_urgent == is_urgent


def test_a_closed_terminal_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption
    finally:
        signal.signal(signal.SIGHUP, before)
