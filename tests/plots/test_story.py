"""The series of a run from its tape and CSV files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_diloco.errors import ConfigError
from lightning_diloco.plots.story import at, read
from tests.plots.conftest import LINES

Make = Callable[..., Path]


def phases(run_dir: Path, name: str) -> list[tuple[str, float, float]]:
    return [(span.phase, span.start_s, span.end_s) for span in read(run_dir).lanes[name].spans]


def test_a_lane_shows_evaluating_and_ends_with_the_leave(make_run: Make) -> None:
    assert phases(make_run(), "l0") == [("stepping", 1, 6), ("evaluating", 6, 8), ("stepping", 8, 10)]


def test_a_process_that_died_is_offline_from_its_last_step_until_its_successor_joins(make_run: Make) -> None:
    assert phases(make_run(), "l1")[:3] == [("stepping", 1, 4), ("offline", 4, 7), ("stepping", 7, 11.5)]


def test_a_lapse_begins_at_the_last_message(make_run: Make) -> None:
    assert phases(make_run(), "l1")[-1] == ("offline", 11.5, 12)


def test_totals_never_fall_although_a_restarted_syncer_has_lower_ones(make_run: Make) -> None:
    assert [y for _, y in read(make_run()).bytes_up] == [100, 200, 300, 300, 340]


def test_goodput_leaves_out_unknown_values(make_run: Make) -> None:
    assert read(make_run()).goodput == [(4, 0.5), (6, 0.5), (8, 0.5), (11, 0.5)]


def test_a_csv_file_for_each_process_gives_the_losses_their_times(make_run: Make) -> None:
    first = "step,train/loss,val/loss\n1,5.5,\n3,4.5,4.6\n"
    second = "step,train/loss,val/loss\n1,3.1,\n3,2.4,2.6\n"
    lane = read(make_run(LINES, first, second)).lanes["l1"]
    assert lane.train_loss == [(2, 5.5), (4, 4.5), (8, 3.1), (11, 2.4)]
    assert lane.val_loss == [(4, 4.6), (11, 2.6)]


def test_losses_of_the_notes_are_used_if_csv_files_do_not_match_the_processes(make_run: Make) -> None:
    lane = read(make_run(LINES, "step,train/loss,val/loss\n1,9.9,\n")).lanes["l1"]
    assert [loss for _, loss in lane.train_loss] == [5.0, 4.0, 4.0, 3.2, 2.5]


def test_commits_have_their_contributors(make_run: Make) -> None:
    assert [(c.t_s, c.fragment, c.learners) for c in read(make_run()).commits] == [
        (3, 0, ("l0", "l1")),
        (9, 1, ("l0",)),
    ]


def test_a_summary_is_read_if_there_is_one(make_run: Make) -> None:
    run_dir = make_run()
    (run_dir / "summary.json").write_text(json.dumps({"run": "r"}))
    assert read(run_dir).summary == {"run": "r"}


def test_a_folder_without_a_tape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        read(tmp_path)


def test_a_run_without_a_join_has_nothing_to_draw(make_run: Make) -> None:
    with pytest.raises(ConfigError, match="no join yet"):
        read(make_run(LINES[:1]))


@pytest.mark.parametrize(("x", "y"), [(-1, 10), (0, 10), (1, 15), (2, 20), (3, 20)])
def test_values_are_interpolated_between_points_and_constant_beyond_them(x: float, y: float) -> None:
    assert at([(0, 10), (2, 20)], x) == y
