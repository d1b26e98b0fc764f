"""Cells of the paper's Table 1, simulated with the parameters of the whole table."""

from __future__ import annotations

import pytest

from tests.bench.goodput_table import CHIPS, LARGEST, PUBLISHED, simulated


@pytest.mark.slow
@pytest.mark.parametrize(("learners", "chips"), [("2", "300k"), ("16", "150k")])
def test_cells_are_within_three_points(learners: str, chips: str) -> None:
    rows = simulated("--learners", learners, "--chips", chips, "--baseline", "dp", "dp-elastic")
    errors = {row["run"]: 100 * row["goodput"] - PUBLISHED[row["run"]][CHIPS.index(chips)] for row in rows}
    assert errors.keys() == {"data parallel", "elastic data parallel", f"{learners} learners"}
    assert max(map(abs, errors.values())) <= LARGEST, errors
