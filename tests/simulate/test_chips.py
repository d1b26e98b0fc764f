"""Chips that fail and return: pauses agree with their rates and durations."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice, pairwise
from statistics import median

import pytest

from lightning_diloco.simulate.chips import Chips, Pause, pauses, trained_s

ONE = Chips(count=64 * 100, mtbi_s=64 * 100 * 1000.0)  # a failure every 1000 s


def first(chips: Chips, number: int, seed: int = 1) -> list[Pause]:
    found = (pause for pause in pauses(chips, random.Random(seed)) if pause.begins_s > 0)
    return list(islice(found, number))


def goodput(chips: Chips, num_failures: int = 4000) -> float:
    until_s = num_failures * chips.failure_s
    return trained_s(pauses(chips, random.Random(1), until_s=until_s), step_s=1e-3, until_s=until_s) / until_s


@pytest.mark.parametrize("is_elastic", [True, False])
@pytest.mark.parametrize("every_s", [10.0, 1000.0])
def test_pauses_are_in_order_apart_and_the_same_for_the_same_seed(is_elastic: bool, every_s: float) -> None:
    chips = replace(ONE, is_elastic=is_elastic, mtbi_s=ONE.count * every_s)
    found = first(chips, 500)
    assert all(one.begins_s < one.ends_s < other.begins_s for one, other in pairwise(found))
    assert all(0 < pause.share <= 1 for pause in found)
    assert found == first(chips, 500)
    assert found != first(chips, 500, seed=2)


def test_rare_failures_stop_an_elastic_learner_twice_if_slices_do_not_wait_and_once_if_they_do() -> None:
    each = Chips(count=1e8, slice_chips=1, mtbi_s=1e8 * 1e5, return_s=500.0)
    lost = {hold: 1 - goodput(replace(each, hold_s=hold), 2000) for hold in (0.0, 1e9)}
    assert lost[0.0] == pytest.approx(2 * each.rescale_s / 1e5, rel=0.1)
    assert lost[1e9] == pytest.approx(each.rescale_s / 1e5, rel=0.1)


def test_a_learner_that_is_not_elastic_loses_its_restart_time_at_each_failure() -> None:
    rigid = replace(ONE, is_elastic=False, restart_s=100.0)
    assert goodput(rigid) == pytest.approx(1 / 1.1, abs=0.005)
    assert goodput(replace(rigid, mtbi_s=ONE.count * 100.0)) == pytest.approx(0.5, abs=0.02)


def test_a_failure_in_the_second_half_of_a_rescale_lengthens_it_by_up_to_a_half() -> None:
    chips = replace(ONE, mtbi_s=ONE.count * 20.0, rescale_s=16.0, hold_s=1e9, return_s=1.0)
    lengths = [pause.ends_s - pause.begins_s for pause in first(chips, 2000)]
    assert min(lengths) == pytest.approx(16.0)
    longer = [length for length in lengths if length > 16.0 + 1e-9]
    assert 0.2 < len(longer) / len(lengths) < 0.5, "a failure in 8 s, with one each 20 s: 33 %"


def test_a_learner_without_any_slice_waits_for_the_first_one_that_returns() -> None:
    alone = Chips(count=8, slice_chips=8, mtbi_s=8000.0, return_s=400.0)
    lengths = [pause.ends_s - pause.begins_s for pause in first(alone, 500)]
    assert 400 < median(lengths) < 440, "half of the slices return within 400 s; then it rescales"
    assert all(pause.share == 1 for pause in first(alone, 500))


def test_slices_missing_at_time_0_do_not_train_before_the_first_pause() -> None:
    chips = replace(ONE, mtbi_s=ONE.count * 100.0, return_s=1000.0)
    begin = [next(pauses(chips, random.Random(seed))) for seed in range(200)]
    assert all(pause.begins_s == 0.0 <= pause.ends_s < 24.0 for pause in begin)
    assert 0.85 < sum(pause.share for pause in begin) / 200 < 0.93, "as at any later time"


def test_a_learner_without_chips_trains_as_little_at_the_beginning_as_later() -> None:
    chips = Chips(count=1, slice_chips=1, mtbi_s=60.0)
    shares = [
        trained_s(pauses(chips, random.Random(seed), until_s=until_s), step_s=1.0, until_s=until_s) / until_s
        for until_s, num_seeds in ((1800.0, 400), (400 * 1800.0, 1))
        for seed in range(num_seeds)
    ]
    assert sum(shares[:400]) / 400 == pytest.approx(shares[400], abs=0.015)


def test_missing_slices_do_not_train() -> None:
    chips = replace(ONE, mtbi_s=ONE.count * 100.0, return_s=1000.0)
    mean_share = sum(pause.share for pause in first(chips, 2000)) / 2000
    assert 0.85 < mean_share < 0.93, "about ten failures per return time, of a hundred slices"


def test_failures_per_slice_are_rarer_by_the_size_of_a_slice() -> None:
    assert replace(ONE, failures_per="slice").failure_s == 64 * ONE.failure_s
