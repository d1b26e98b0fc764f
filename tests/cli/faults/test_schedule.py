"""The same seed gives the same faults; rates, kinds and durations are as requested."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from lightning_diloco.cli.faults.schedule import KINDS, LASTS_S, SYNCER, Fault, Kind, draw

LEARNERS = ["l0", "l1", "l2"]


def faults(num: int, seed: int = 1, kinds: tuple[Kind, ...] = KINDS, faults_per_hour: float = 60.0) -> list[Fault]:
    drawn = draw(kinds, LEARNERS, num_shards=3, faults_per_hour=faults_per_hour, seed=seed)
    return list(itertools.islice(drawn, num))


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    assert faults(50) == faults(50)
    assert faults(50) != faults(50, seed=2)


def test_times_are_those_of_a_poisson_process() -> None:
    drawn = faults(4000)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(drawn)]
    mean_s = sum(gaps) / len(gaps)
    assert mean_s == pytest.approx(60.0, rel=0.05)
    assert sum(gap > mean_s for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # 1 / e


def test_kinds_are_equally_frequent_and_targets_fit_them() -> None:
    drawn = faults(600)
    assert set(Counter(fault.kind for fault in drawn).values()) == {100}
    assert {fault.target for fault in drawn if fault.kind == "syncer"} == {SYNCER}
    assert {fault.target for fault in drawn if fault.kind == "shard"} == {"shard-1", "shard-2"}
    assert {fault.target for fault in drawn if fault.kind not in ("syncer", "shard")} == set(LEARNERS)


def test_durations_are_within_bounds_and_kills_have_none() -> None:
    for fault in faults(500):
        low_s, high_s = LASTS_S.get(fault.kind, (0.0, 0.0))
        assert low_s <= fault.lasts_s <= high_s
        assert (fault.rate_bps is not None) == (fault.kind == "slow")


def test_only_the_requested_kinds_are_drawn() -> None:
    assert {fault.kind for fault in faults(40, kinds=("kill", "cut"))} == {"kill", "cut"}
