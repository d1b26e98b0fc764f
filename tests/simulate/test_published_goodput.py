"""Published goodput, simulated: cells of Table 1 with the parameters of the whole table, and scavenged chips."""

from __future__ import annotations

import pytest

from tests.bench.goodput_table import CHIPS, LARGEST, PUBLISHED, SCAVENGING_OFF, furthest, scavenging, simulated


@pytest.mark.slow
@pytest.mark.parametrize(("learners", "chips"), [("2", "300k"), ("16", "150k")])
def test_cells_are_within_three_points(learners: str, chips: str) -> None:
    rows = simulated("--learners", learners, "--chips", chips, "--baseline", "dp", "dp-elastic")
    errors = {row["run"]: 100 * row["goodput"] - PUBLISHED[row["run"]][CHIPS.index(chips)] for row in rows}
    assert errors.keys() == {"data parallel", "elastic data parallel", f"{learners} learners"}
    assert max(map(abs, errors.values())) <= LARGEST, errors


@pytest.mark.slow
def test_scavenged_chips_save_time_unless_training_is_data_parallel() -> None:
    rows = scavenging([2])
    assert [row["run"] for row in rows] == ["8 learners, +25% chips", "elastic data parallel, +25% chips"]
    assert furthest(rows, "8 learners") <= 0.01, rows
    assert furthest(rows, "elastic") <= SCAVENGING_OFF, rows
    assert furthest(scavenging([2], 160.0), "elastic") > SCAVENGING_OFF, "control: a link of twice the rate"
