"""Assumptions of `diloco simulate`: they describe all rows."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_diloco.cli.scenarios.rows import rows_of
from lightning_diloco.cli.views.simulate import assumptions

DAY_S = 86400.0


def said(**given: Any) -> str:
    return "\n".join(assumptions(rows_of(given)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "each chip fails once in 1y on average"),
        ({"mtbi": [60.0]}, "each chip fails once in 1min on average"),
        ({"mtbi": [DAY_S, 30 * DAY_S]}, "fails once in 1d or 30d on average"),
        ({"mtbi": [k * DAY_S for k in range(1, 6)]}, "fails once in 1d to 5d on average"),
        ({"chips": [64, 1e6]}, "a failure takes 8 or 64 chip(s) away"),
        ({}, "for less than 20min (exponentiated Weibull distribution, exponents 1.5 and 1.2)"),
        ({"return": 3600.0}, "failures begin 8h before the simulation"),
        ({"step": [1.0, 1.18], "spread": 0.2, "jitter": 0.05}, "1s or 1.18s, with spread 20% and jitter 5%"),
        ({"parameters": 12e9}, "12,000,000,000 parameters, 24 fragments, int8 on the wire"),
        ({"quorum": [4, 1], "sync_every": [24, 2]}, "2 or 24 fragments, int8 on the wire; H = 2 or 24, K = 1 or 4"),
        ({"grace": ["adaptive", 0.0, 2.0]}, "tau = 2, grace 0 or 2s or adaptive"),
        ({"link": [1e9, 5e9], "rtt": 0.2}, "link has 1 Gbit/s or 5 Gbit/s, a round trip takes 200ms"),
        ({"standby_link": 1e10}, "a merge includes the copy to a standby, over 10 Gbit/s"),
        ({"seed": 0, "duration": 600.0}, "simulated: 10min, and a drain of at most 1min; seed 0"),
        (
            {"learners": [2, 8]},
            "together, if all are as fast as the fastest, and a drain of at most 1min; seed 1",
        ),
        ({"baseline": ["dp"]}, "(data parallel training: 1,000,000 steps)"),
        ({"baseline": ["dp"], "restart": 90.0}, "a job that is not elastic restarts 1.5min after a failure"),
        ({"mtbf": 3600.0}, "dies every 1h on average, loses what was not merged, and steps again after 2min"),
        ({"outage_every": 3600.0, "outage": 5.0}, "a learner's link fails every 1h on average, for 5s"),
        ({"syncer_mtbf": 3600.0, "shards": 4}, "each of its 3 other shard(s) fails every 1h on average, for 1min"),
        ({"extra": 2, "extra_for": 600.0}, "2 more learners train for 10min in the middle of the run"),
    ],
)
def test_assumptions_describe_all_rows(given: dict[str, Any], sentence: str) -> None:
    assert sentence in said(**given)


def test_data_parallel_training_is_described_only_where_it_is_simulated() -> None:
    extra = {"extra": 2, "extra_for": 600.0}
    assert "further sites" in said(**extra, baseline=["dp-elastic"], site_link=8e10)
    assert "data parallel" not in said(**extra)
    assert "not elastic" not in said(**extra, baseline=["dp-elastic"])
