from __future__ import annotations

import pytest

from lightning_diloco.protocol.syncer.grace import Ema, grace_window_s


def test_the_window_is_a_share_of_the_slack() -> None:
    window_s = grace_window_s(overlap=2, step_s=1.0, quorum_s=0.9, sync_s=0.3, gamma=0.5)

    assert window_s == pytest.approx(0.5 * (2 * 1.0 - 0.9 - 0.3))


def test_without_slack_there_is_no_window() -> None:
    assert grace_window_s(overlap=1, step_s=1.0, quorum_s=2.0, sync_s=0.5) == 0.0


def test_the_window_is_never_longer_than_a_step_of_the_opener() -> None:
    assert grace_window_s(overlap=8, step_s=0.5, quorum_s=0.0, sync_s=0.0) == 0.5


def test_the_average_starts_as_a_mean_and_then_forgets() -> None:
    ema = Ema(weight=0.2)
    for sample in (1.0, 2.0, 3.0):
        ema.add(sample)
    assert ema.mean == pytest.approx(2.0)
    assert ema.is_settled

    for _ in range(100):
        ema.add(10.0)
    assert ema.mean == pytest.approx(10.0)


def test_two_samples_are_too_few() -> None:
    ema = Ema()
    ema.add(1.0)
    ema.add(1.0)
    assert not ema.is_settled
