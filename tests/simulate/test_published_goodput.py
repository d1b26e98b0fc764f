"""Published goodput, simulated: Table 1 with the parameters of the whole table, and scavenged chips."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from lightning_diloco.cli.text.quantities import count
from lightning_diloco.simulate.chips import Chips
from lightning_diloco.simulate.goodput import Scenario, data_parallel
from tests.bench import report
from tests.bench.goodput_table import CHIPS, LARGEST, PUBLISHED, SCAVENGING_OFF, furthest, scavenging, simulated

STORED = json.loads((report.ROOT / "tests" / "bench" / "results" / "goodput_table.json").read_text())
BASELINES = {"data parallel": False, "elastic data parallel": True}
MISSED = {("data parallel", "2.4M")}  # see the README of the benchmarks


@pytest.mark.slow
@pytest.mark.parametrize(("learners", "chips"), [("2", "300k"), ("16", "150k"), ("16", "2.4M")])
def test_cells_are_within_three_points_and_equal_the_stored_ones(learners: str, chips: str) -> None:
    (row,) = simulated("--learners", learners, "--chips", chips, "--seed", "1")
    assert abs(100 * row["goodput"] - PUBLISHED[row["run"]][CHIPS.index(chips)]) <= LARGEST, row
    assert row["goodput"] == pytest.approx(stored(row)["goodputs"][0], rel=1e-9)


def test_cells_of_data_parallel_training_are_within_three_points_and_equal_the_stored_ones() -> None:
    off = {}
    for (run, is_elastic), chips in itertools.product(BASELINES.items(), CHIPS):
        scenario = Scenario(num_learners=1, chips=Chips(count=count(chips)))
        goodput = data_parallel(scenario, is_elastic=is_elastic).goodput
        assert goodput == pytest.approx(stored({"run": run, "chips": count(chips)})["goodputs"][0], rel=1e-9)
        off[run, chips] = 100 * goodput - PUBLISHED[run][CHIPS.index(chips)]
    assert {cell for cell, error in off.items() if abs(error) > LARGEST} == MISSED, off


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """Return the stored cell of the same run and number of chips."""
    (cell,) = (cell for cell in STORED["cells"] if (cell["run"], cell["chips"]) == (row["run"], row["chips"]))
    return cell


@pytest.mark.slow
def test_scavenged_chips_save_time_unless_training_is_data_parallel() -> None:
    rows = scavenging([2])
    assert [row["run"] for row in rows] == ["8 learners, +25% chips", "elastic data parallel, +25% chips"]
    assert furthest(rows, "8 learners") <= 0.01, rows
    assert furthest(rows, "elastic") <= SCAVENGING_OFF, rows
    assert furthest(scavenging([2], 160.0), "elastic") > SCAVENGING_OFF, "control: a link of twice the rate"
