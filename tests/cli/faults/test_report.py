"""Figures of a chaos run, from a small story with known results."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.faults import picture
from lightning_diloco.cli.faults.report import compared, measure, recovery_s, steps_to_compare
from lightning_diloco.cli.faults.story import FAULTS, Story, read
from lightning_diloco.errors import ConfigError

NAN = math.nan
# Two fragments, 10 tokens a step. l0: 11 steps, killed at 110.5, back from 130 to 140. l1: all the time, a stop of 8 s.
STEPS = {"l0": [[100.0 + t for t in range(11)], [130.0 + t for t in range(11)]],
         "l1": [[*(100.0 + t for t in range(11)), 120.0, 121.0, NAN, *(125.0 + t for t in range(16))]]}  # fmt: skip
SUMMARY: dict[str, Any] = {
    "status": "finished", "ledger_exact": True, "participation": 0.9, "eval_loss": 3.0, "eval_reason": None,
    "rounds": 9, "tokens_seen": 1000, "tokens_merged": 900, "tokens_discarded": {"lapsed": 100}, "tokens_pending": 0,
    "fleet_tokens": 500.0, "goodput": 0.5,
    "learners": [{"step": 10, "tokens": 100}, {"step": 11, "tokens": 110}, {"step": 29, "tokens": 290}],
}  # fmt: skip
TAPE = [
    {"t": 110.4, "event": "commit", "learners": ["l0", "l1"], "fragment": 0},
    {"t": 111.0, "event": "commit", "learners": ["l0"], "fragment": 1},
    {"t": 122.5, "event": "commit", "learners": ["l1"], "fragment": 0},
    {"t": 132.0, "event": "commit", "learners": ["l0", "l1"], "fragment": 1},
    {"t": 141.0, "event": "leave", "learner": "l1", "reason": "finished"},
]


def line(what: str, number: int, kind: str, target: str, t: float) -> dict[str, Any]:
    return {"what": what, "number": number, "kind": kind, "target": target, "t": t}


LINES = [
    line("begin", 1, "kill", "l0", 110.5),
    line("begin", 2, "stop", "l1", 110.5),
    line("skip", 3, "kill", "l1", 111.0),
    line("end", 2, "stop", "l1", 118.5),
    line("begin", 4, "syncer", "syncer", 120.5),
]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    for name, lives in STEPS.items():
        folder = tmp_path / "learners" / name
        folder.mkdir(parents=True)
        for number, life in enumerate(lives):
            (folder / f"steps-{number}.f64").write_bytes(array("d", life).tobytes() + b"torn")
        (folder / "steps-99.f64").write_bytes(b"")
    for path, lines in ((FAULTS, LINES), (Path("tape") / "events.jsonl", [{"lsn": 1, **entry} for entry in TAPE])):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return read(tmp_path)


def test_shares_follow_their_definitions(story: Story) -> None:
    found = measure(story)
    assert found["num_steps"] == 22 + 29
    assert found["step_efficiency"] == pytest.approx(450 / 510)
    assert found["merged_of_seen"] == pytest.approx(0.9)
    assert found["availability"] == pytest.approx((10 + 10 + 40 - 8) / (40 + 41))
    assert found["goodput"] == pytest.approx(450 / (40 * 10 + 41 * 10))
    assert found["participation"] == 0.9


def test_gaps_leave_out_validation_other_processes_and_stops(story: Story) -> None:
    assert measure(story)["longest_gap_s"] == {"l0": 1.0, "l1": pytest.approx(2.0)}  # 110 to 120, of which 8 s stopped


def test_recovery_ends_with_the_first_commit_that_names_the_new_process(story: Story) -> None:
    found = measure(story)
    assert found["recovery_s"] == {"l0": pytest.approx(21.5), "l1": pytest.approx(4.0), "syncer": pytest.approx(2.0)}
    assert [r["fault"] for r in found["recoveries"]] == [1, 2, 4]


def test_a_syncer_that_no_learner_needed_has_no_recovery_time(story: Story) -> None:
    assert recovery_s(story, {**line("begin", 9, "syncer", "syncer", 150.0), "until_s": 150.0}) is None


def test_a_shard_has_recovered_with_the_next_commit_of_one_of_its_fragments(story: Story) -> None:
    killed = {**line("begin", 9, "shard", "shard-1", 112.0), "until_s": 112.0}
    assert recovery_s(dataclasses.replace(story, num_shards=2), killed) == pytest.approx(20.0)


def test_faults_are_counted_as_applied(story: Story) -> None:
    found = measure(story)
    assert (found["num_faults"], found["num_faults_skipped"]) == (3, 1)
    assert found["num_faults_by_kind"] == {"kill": 1, "stop": 1, "syncer": 1}


@pytest.mark.parametrize("change", [{"ledger_exact": False}, {"tokens_pending": 1}])
def test_a_ledger_is_exact_only_if_it_is_marked_exact_and_adds_up(story: Story, change: dict[str, Any]) -> None:
    assert measure(story)["ledger_exact"] is True
    (story.summary or {}).update(change)
    assert measure(story)["ledger_exact"] is False


def test_a_run_without_files_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "chaos").mkdir()
    (tmp_path / FAULTS).write_text("")
    found = measure(read(tmp_path))
    assert (found["status"], found["ledger_exact"], found["step_efficiency"]) == ("no summary", False, None)


def test_the_run_to_compare_with_merges_as_many_tokens(story: Story) -> None:
    assert steps_to_compare(story, num_learners=3) == 15  # 450 tokens, 10 a step, 3 learners
    found = compared({"eval_loss": 3.0, "tokens_merged": 900}, {"eval_loss": 2.5, "tokens_merged": 895})
    assert (found["eval_loss_calm"], found["eval_loss_excess"]) == (2.5, pytest.approx(0.2))


def test_losses_after_different_numbers_of_tokens_are_not_compared() -> None:
    found = compared({"eval_loss": 3.0, "tokens_merged": 900}, {"eval_loss": 2.5, "tokens_merged": 880})
    assert (found["eval_loss_calm"], found["eval_loss_excess"]) == (2.5, None)


def test_the_picture_is_drawn(story: Story, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture.draw(story, tmp_path / "chaos.png", title="a run")
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_named(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"lightning-diloco\[plot\]"):
        picture.draw(story, Path("never.png"), title="a run")
