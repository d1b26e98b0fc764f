"""The number of streams is found from the speed of transfers alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_diloco.transport.streams import AGAIN, MAX_STREAMS, MIN_STREAM_BYTES, TRIALS, NumStreams

LARGE = 64 * MIN_STREAM_BYTES


def settled(
    streams: NumStreams, rate: Callable[[int], float], num_bytes: int = LARGE, transfers: int = 6 * TRIALS
) -> int:
    """Return the number of streams after this number of transfers over a link with these rates."""
    for _ in range(transfers):
        num = streams.number_for(num_bytes)
        streams.note(num, num_bytes, num_bytes / rate(num))
    return streams.number_for(num_bytes)


@pytest.mark.parametrize(("full_at", "wanted"), [(1, 1), (2, 2), (3, 4), (8, 8), (100, MAX_STREAMS)])
def test_the_number_is_doubled_until_the_link_is_full(full_at: int, wanted: int) -> None:
    assert settled(NumStreams(), lambda num: 1e6 * min(num, full_at)) == wanted


def test_streams_that_hurt_each_other_are_not_used() -> None:
    assert settled(NumStreams(), lambda num: 1e6 * (1.8 if num == 2 else 1 / num)) == 2


def test_one_fast_transfer_among_slow_ones_does_not_count() -> None:
    lucky = iter([1.0, 1.0, 1.0, 1.0, 3.0] + [0.8] * 99)
    assert settled(NumStreams(), lambda num: 1e6 * next(lucky)) == 1


def test_a_link_that_changes_is_measured_again() -> None:
    streams = NumStreams()
    assert settled(streams, lambda num: 1e6) == 1
    assert settled(streams, lambda num: 1e6 * min(num, 4), transfers=AGAIN + 6 * TRIALS) == 4
    for _ in range(3):  # the number is halved each time
        settled(streams, lambda num: 1e6, transfers=AGAIN + 2 * TRIALS)
    assert settled(streams, lambda num: 1e6, transfers=2 * TRIALS) == 1


def test_short_payloads_use_few_streams_and_do_not_count_as_measurements() -> None:
    streams = NumStreams()
    assert settled(streams, lambda num: 1e6 * num, num_bytes=MIN_STREAM_BYTES // 2) == 1
    assert settled(streams, lambda num: 1e6 * num) == MAX_STREAMS
    assert streams.number_for(3 * MIN_STREAM_BYTES) == 3
    assert streams.number_for(10) == 1
    for _ in range(3 * AGAIN):
        streams.note(3, 3 * MIN_STREAM_BYTES, 1.0)
    assert streams.number_for(LARGE) == MAX_STREAMS
