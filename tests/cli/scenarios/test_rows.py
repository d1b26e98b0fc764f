"""Rows of a forecast, before they are simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.scenarios import rows
from lightning_diloco.cli.scenarios.file import read
from lightning_diloco.cli.scenarios.rows import rows_of
from lightning_diloco.errors import ConfigError
from lightning_diloco.simulate.goodput import Outcome

NOTHING = Outcome(goodput=0.0, work=0.0, uptime=0.0, pauses=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learners": [8, 2], "quorum": [4]}, "--quorum 4: must be at most --learners, 2"),
        ({"learners": [2, 8], "chips": [4]}, "0.5 chips for each of 8 learners; .* take at least 8 in all"),
        ({"chips": [1e6, 100], "slice": 64}, "slices of 64 chips, and 12.5 chips of each learner"),
        ({"sync_every": [24, 2], "shards": 4, "syncer_mtbf": 60.0}, "4 shards for 2 fragments; .* choose 1 to 2"),
        ({"mtbi": [74040.0, 74100.0], "grace": [0.0]}, "several rows are called '8 learners, mtbi 20.6h'"),
        ({"steps": 9}, "9 s are simulated, .* at least 10 of these steps; simulate at least 10 s"),
        ({"extra": 2, "extra_for": 90.0, "duration": 60.0}, "2 extra learners for 90 s of 60 s"),
    ],
)
def test_all_rows_are_checked_before_the_first_one_is_simulated(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rows_of(given)


def test_ten_steps_are_enough() -> None:
    assert rows_of({"steps": 10, "step": [0.1]})[0].scenario.length_s == pytest.approx(1.0)


def test_a_baseline_has_no_quorum_of_learners() -> None:
    baseline, fleet = rows_of({"learners": [2], "quorum": [2], "baseline": ["dp"]})
    assert (baseline.scenario.config.quorum, fleet.scenario.config.quorum) == (1, 2)


def test_a_repeated_value_is_simulated_once() -> None:
    assert [row.label for row in rows_of({"learners": [2, 2], "baseline": ["dp", "dp"]})] == [
        "data parallel",
        "2 learners",
    ]


def test_a_baseline_with_extra_chips_is_as_long_as_the_run_of_the_learners() -> None:
    given = {"chips": [1000.0], "mtbi": [1e12], "extra": 8, "extra_for": 3600.0, "baseline": ["dp-elastic"]}
    baseline, fleet = rows_of(given)
    assert baseline.found.work == pytest.approx(1 + 3600 / fleet.scenario.length_s, abs=0.01)


def test_labels_name_times_with_a_unit() -> None:
    found = rows_of({"mtbi": [30 * 86400, 365.25 * 86400], "grace": [0.0, 2.0], "link": [1e9], "baseline": ["dp"]})
    assert [row.label for row in found] == [
        *("data parallel, mtbi 30d", "data parallel, mtbi 1y"),
        *("8 learners, grace 0, mtbi 30d", "8 learners, grace 0, mtbi 1y"),
        *("8 learners, grace 2s, mtbi 30d", "8 learners, grace 2s, mtbi 1y"),
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"learners": [3], "chips": [64.0], "mtbi": [1e17], "seed": 0, "step": [1.0, 1.18], "rtt": 1e-5},
        {"extra": 2, "extra_for": 60.0, "steps": 500.0, "site_link": 8e10, "baseline": ["dp", "dp-elastic"]},
        {"mtbf": 900.0, "syncer_mtbf": 900.0, "shards": 3, "standby_link": 1e10, "outage_every": 90.0, "grace": [0.0]},
    ],
)
def test_the_scenario_of_a_row_repeats_it(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "simulate", lambda scenario: NOTHING)
    monkeypatch.setattr(rows, "data_parallel", lambda scenario, is_elastic: NOTHING)
    for row in rows_of(given):
        path = tmp_path / "row.yaml"
        path.write_text(json.dumps(row.figures()["scenario"]))
        (same,) = [again for again in rows_of(read(path)) if again.baseline == row.baseline]
        assert same.figures() == row.figures()
        if row.baseline is not None or "site_link" not in given:  # which the learners do not use
            assert same.scenario == row.scenario
