"""Stall, rates and steps, computed from the times at which a hook is entered and left."""

from __future__ import annotations

import pytest

from lightning_diloco.learner.step_timer import NUM_SAMPLES, NUM_WARM_UP, StepTimer


class Training:
    """Simulates steps and hooks of given lengths."""

    def __init__(self) -> None:
        self.watch, self.now_s = StepTimer(), 0.0

    def step(self, step_s: float, hook_s: float = 0.0, tokens: int = 10, num_exchanges: int = 0) -> None:
        self.now_s += step_s
        self.watch.entered(entered_s := self.now_s, tokens)
        self.now_s += hook_s
        self.watch.left(entered_s, self.now_s, num_exchanges=num_exchanges)


def test_rates_exclude_hooks_and_stall_is_the_time_of_hooks() -> None:
    training = Training()
    for _ in range(10):
        training.step(0.5, hook_s=0.25)
    assert training.watch.step_s == pytest.approx(0.5)
    assert training.watch.tokens_per_s == pytest.approx(20.0)
    assert training.watch.stall_s == pytest.approx(2.5)


def test_warm_up_compiling_steps_and_interruptions_do_not_count_as_steps() -> None:
    training = Training()
    for step_s in [9.0] * (NUM_WARM_UP + 1) + [1.0] * 5 + [30.0] + [1.0]:
        training.step(step_s)
    training.watch.interrupted()
    training.step(3.0)
    training.step(1.0)
    assert training.watch.step_s == pytest.approx(1.0)
    assert training.watch.long_step_s == pytest.approx(1.0)


def test_a_first_step_that_compiles_does_not_count_as_a_long_step() -> None:
    training = Training()
    for step_s in [1.0] * (NUM_WARM_UP + 1) + [60.0] + [1.0] * 2:
        training.step(step_s)
    assert training.watch.long_step_s <= 5.0

    training = Training()
    for step_s in [60.0] * (NUM_WARM_UP + 2) + [1.0] * 3:
        training.step(step_s)
    assert training.watch.step_s == pytest.approx(1.0)
    assert training.watch.long_step_s == pytest.approx(5.0)


def test_steps_that_stay_much_longer_count_after_a_few() -> None:
    training = Training()
    for step_s in [1.0] * 300 + [30.0] + [1.0] * 20 + [8.0] * 4:
        training.step(step_s)
    assert training.watch.step_s == pytest.approx(1.0), "four in a row may be compilation"
    training.step(8.0)
    assert training.watch.step_s == pytest.approx(8.0)
    assert training.watch.long_step_s == pytest.approx(8.0)
    for _ in range(600):
        training.step(8.0)
    assert training.watch.tokens_per_s == pytest.approx(10.0 / 8.0)
    training.step(80.0)
    assert training.watch.step_s == training.watch.long_step_s == pytest.approx(8.0)


def test_long_steps_of_a_shared_device_count() -> None:
    training = Training()
    for step_s in [1.0] * 50 + [9.0, 9.0, 1.0] * 4:
        training.step(step_s)
    assert training.watch.step_s == pytest.approx(9.0)
    for step_s in ([1.0] * 50 + [9.0] * 2) * 4:  # two in fifty: a checkpoint, with what comes after it
        training.step(step_s)
    assert training.watch.step_s == pytest.approx(1.0)


def test_percentile_is_per_snapshot_or_landing() -> None:
    training = Training()
    for hook_s in [0.002] * 19 + [0.4]:
        training.step(0.1, hook_s=hook_s, num_exchanges=2)
    training.step(0.1, hook_s=9.0)  # no exchange in it
    assert training.watch.num_exchanges == 40
    assert training.watch.exchange_p95_s == pytest.approx(0.2)


def test_settling_counts_as_stall_of_the_previous_exchange_and_not_as_part_of_the_step() -> None:
    training = Training()
    for _ in range(20):
        training.step(0.5, hook_s=0.1, num_exchanges=2)
        training.watch.settled(0.2)
        training.now_s += 0.2
    assert training.watch.exchange_p95_s == pytest.approx(0.15)
    assert training.watch.stall_s == pytest.approx(20 * 0.3)
    assert training.watch.step_s == pytest.approx(0.5)
    assert training.watch.tokens_per_s == pytest.approx(20.0)
    training.step(0.5, hook_s=0.1)
    training.watch.settled(9.0)  # of no exchange
    assert training.watch.exchange_p95_s == pytest.approx(0.15)


def test_values_are_zero_before_any_measurement() -> None:
    watch = StepTimer()
    assert (watch.step_s, watch.long_step_s, watch.tokens_per_s) == (0.0, 0.0, 0.0)
    assert (watch.exchange_p95_s, watch.stall_s) == (0.0, 0.0)


def test_the_rate_covers_the_whole_run_and_not_only_its_end() -> None:
    training = Training()
    for step_s in [1.0] * 2000 + [0.5] * 1500:
        training.step(step_s)
    assert training.watch.step_s == pytest.approx(0.5)
    assert training.watch.tokens_per_s == pytest.approx(10.0)
    assert len(training.watch._rates._values) < NUM_SAMPLES
