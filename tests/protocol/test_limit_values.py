"""Values that no working peer sends are refused before a state machine handles them."""

from __future__ import annotations

import pytest

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.messages import Evaluated, Heartbeat, Hello, Intent, Leave, Mark, Progress, Ready


def progress(**changes: object) -> Progress:
    values = {"step": 3, "tokens": 90, "landed": (1, 2), "pending": (((0, 9), (30, 90)), ())}
    return Progress(**{**values, **changes})  # type: ignore[arg-type]


def test_the_bounds_themselves_are_allowed() -> None:
    for message in (
        Intent(0, 3600.0, 0.0, 3600.0),
        Ready(2**53 - 1, 0, 0, 2**31 - 1, 0, 2**53 - 1, 1),
        Heartbeat("stepping", progress(), 0.0, 0.0),
    ):
        assert messages.decode(messages.encode(message), messages.FromLearner) == message


@pytest.mark.parametrize(
    "message",
    [
        Intent(-1, 0.1),
        Intent(0, -0.1),
        Intent(0, 1e300),
        Intent(0, 0.1, 0.0, 1e300),
        Ready(0, 2**53, 0, 0, 0, 9, 1),
        Ready(0, 1, 0, 2**31, 0, 9, 1),
        Ready(0, 1, 0, 0, -9, 9, 1),
        Hello("../../etc", 1, 1, {}),
        Hello("l0", 1, 1, {}, known=(Mark(2**31, 0, ""),)),
        Heartbeat("stepping", progress(tokens=80), 0.1, 1.0),
        Heartbeat("stepping", progress(pending=(((9, 3),), ())), 0.1, 1.0),
        Heartbeat("stepping", progress(landed=(1, -2)), 0.1, 1.0),
        Heartbeat("stepping", progress(discarded={"overwritten": -5}), 0.1, 1.0),
        Heartbeat("stepping", progress(), 0.1, -1.0),
        Heartbeat("stepping", progress(pending=(((0, 9), (20, 30), (40, 90)), ())), 0.1, 1.0),
        Heartbeat("stepping", progress(), 0.1, 1.0, {f"metric {i}": 0.0 for i in range(201)}),
        Heartbeat("stepping", progress(discarded={"x" * 1001: 1}), 0.1, 1.0),
        Hello("l0", 1, 1, {}, where="x" * 1001),
        Evaluated(None, "x" * 1001),
        Leave("finished", progress(generation=2**31), 1.0),
    ],
    ids=lambda message: repr(message)[:60],
)
def test_values_beyond_the_bounds_are_refused(message: messages.FromLearner) -> None:
    with pytest.raises(CorruptMessageError, match="must"):
        messages.decode(messages.encode(message), messages.FromLearner)
