"""The feed returns the latest state of a syncer, also while the syncer is silent."""

from __future__ import annotations

import threading

import pytest

from lightning_diloco.cli.local.feed import StatusFeed
from lightning_diloco.errors import TransportError


@pytest.mark.parametrize(("patience_s", "silent"), [(0.0, (None, "gone")), (60.0, ({"step": 1}, None))])
def test_a_silence_longer_than_the_patience_is_a_problem_until_the_next_answer(
    patience_s: float, silent: tuple[object, object]
) -> None:
    answers = iter([{"step": 1}, TransportError("gone"), {"step": 3}])
    seen: list[tuple[object, object]] = []
    over = threading.Event()

    def fetch() -> dict[str, int]:
        seen.append((feed.latest, feed.problem))
        answer = next(answers, None)
        if answer is None:
            over.set()
            return {}
        if isinstance(answer, TransportError):
            raise answer
        return answer

    feed = StatusFeed(fetch, period_s=0.0, patience_s=patience_s)
    with feed:
        assert over.wait(timeout=10.0)
    assert seen[:4] == [(None, None), ({"step": 1}, None), silent, ({"step": 3}, None)]


def test_a_syncer_that_does_not_answer_does_not_block_the_caller() -> None:
    asked, released = threading.Event(), threading.Event()

    def fetch() -> dict[str, int]:
        asked.set()
        released.wait(timeout=10.0)
        return {}

    with StatusFeed(fetch) as feed:
        assert asked.wait(timeout=10.0)
        assert feed.latest is None
        released.set()
