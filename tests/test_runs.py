"""The functions for notebooks and scripts, with a handwritten run directory and with a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_diloco
from lightning_diloco.errors import ConfigError
from lightning_diloco.planner.bandwidth import Machines
from tests.plots.conftest import LINES, make_run

__all__ = ["make_run"]

CSV = "step,train/loss,val/loss\n1,5.5,\n3,4.5,4.6\n"
SECOND_CSV = "step,train/loss,val/loss\n1,3.1,\n3,2.4,2.6\n"


def test_the_history_of_a_run_is_tables(make_run: Callable[..., Path]) -> None:
    history = lightning_diloco.run_history(make_run(LINES, CSV, SECOND_CSV))
    assert history.progress.slice(0, 2).to_pylist() == [
        {"t_s": 2.0, "fleet_tokens": 40, "goodput": None, "bytes_up": 100, "bytes_down": 200},
        {"t_s": 4.0, "fleet_tokens": 80, "goodput": 0.5, "bytes_up": 200, "bytes_down": 400},
    ]
    assert history.commits.select(["t_s", "fragment", "version", "learners"]).to_pylist() == [
        {"t_s": 3.0, "fragment": 0, "version": 1, "learners": ["l0", "l1"]},
        {"t_s": 9.0, "fragment": 1, "version": 1, "learners": ["l0"]},
    ]
    assert history.phases.slice(0, 1).to_pylist() == [
        {"learner": "l0", "start_s": 1.0, "end_s": 6.0, "phase": "stepping"}
    ]
    assert history.events.slice(0, 2).to_pydict() == {
        "learner": ["l0", "l0"],
        "t_s": [1, 10],
        "event": ["join", "leave"],
    }
    assert history.steps["step"].to_pylist()[:3] == [2, 4, 6]
    losses = [tuple(row.values()) for row in history.losses.to_pylist() if row["learner"] == "l1"]
    assert losses[0] == ("l1", 2.0, "train", 5.5)
    assert losses[-1] == ("l1", 11.0, "val", 2.6)
    assert history.summary == {}
    assert repr(history).startswith("RunHistory(progress: 5 rows, commits: 2 rows, phases: ")
    assert repr(history).endswith("summary: none yet)")


def test_a_folder_without_a_tape_has_no_history(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a run directory has a tape"):
        lightning_diloco.run_history(str(tmp_path))


def module_of(width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(64, width), nn.Linear(width, width))


def test_a_module_is_planned_without_its_values() -> None:
    machines = Machines(num_learners=2, link_bps=1e9, step_s=0.1)
    small, large = (lightning_diloco.plan_run(module_of(width), machines, sync_every=4) for width in (32, 1 << 14))
    assert small.is_feasible
    assert small.scenario.mean_names == {"0.weight"}
    assert small.scenario.config.sync_every == 4
    assert not large.is_feasible
    assert large.tightest.load is not None
    assert large.tightest.load > 1


def test_an_unknown_option_of_a_plan_is_named() -> None:
    with pytest.raises(ConfigError, match="sync_ever"):
        lightning_diloco.plan_run(module_of(32), Machines(), sync_ever=4)
