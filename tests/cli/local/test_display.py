"""The display of a run's state."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_diloco.cli.local.display import Screen, event_lines, status_lines, status_view, summary_view, wait_lines


def status(**changes: Any) -> dict[str, Any]:
    learner = {
        "id": "l0",
        "incarnation": 1,
        "where": "host:17",
        "site": "",
        "phase": "stepping",
        "trainer_step": 120,
        "tokens": 30_720,
        "metrics": {"loss": 3.21456},
        "tokens_per_s": 5123.4,
        "staleness_versions": 0,
        "quarantined": None,
        "last_contribution_s_ago": 0.84,
        "last_heard_s_ago": 0.1,
    }
    joining = {**learner, "id": "l1", "phase": "joining", "metrics": {}, "tokens_per_s": None, "trainer_step": 0}
    wait = {"what": "fragment 3, round 17", "for": ["l1"], "since_s": 1.25, "until_s": 0.4, "then": "merge l0"}
    return {
        "run": "gpt",
        "state": "open",
        "reason": None,
        "uptime_s": 12.5,
        "config": {},
        "learners": [learner, {**joining, "last_contribution_s_ago": None}],
        "versions": [4, 5, 4],
        "rounds": [],
        "waits": [wait],
        "num_commits": 13,
        "effective_quorum": 1,
        "participation": 0.975,
        "goodput": None,
        "fleet_tokens": 61_440.0,
        "bytes_up": 2_500_000,
        "bytes_down": 900,
        **changes,
    }


def drawn(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if name in line)
    return [cell.strip() for cell in line.strip("│ ").split("│")]


def test_learners_are_grouped_by_site_if_they_have_one() -> None:
    assert "no site given" not in drawn(status_view(status()))
    l0, l1 = status()["learners"]
    fleet = [l0, {**l1, "site": "us-east"}, {**l0, "id": "l2", "site": "eu-west"}]
    lines = drawn(status_view(status(learners=fleet))).splitlines()
    shown = [line.strip("│ ").split()[0] for line in lines if line.startswith("│")]
    assert shown == ["eu-west", "l2", "us-east", "l1", "no", "l0"]


def test_the_table_shows_each_learner() -> None:
    text = drawn(status_view(status()))
    assert cells(text, "l0 ") == ["l0", "stepping", "120", "3.2146", "5.123k", "0", "0.8 s ago"]
    assert cells(text, "l1 ") == ["l1", "joining", "0", "-", "-", "0", "-"]


def test_the_table_shows_the_run() -> None:
    text = drawn(status_view(status()))
    for part in ("run gpt", "training: 13 commits, versions 4..5 of 3 fragments, quorum 1", "2.5 MB received"):
        assert part in text
    assert "61.44k tokens, participation 97.5 %, goodput -" in text


def test_the_latest_events_are_shown_with_their_times() -> None:
    told = [{"number": k, "t": 1_700_000_000.0 + k, "event": "return", "learner": f"l{k}"} for k in range(20)]
    lines = list(event_lines(status(recent=[*told, {"t": 1_700_000_020.0, "event": "unknown"}])))
    assert [line.partition(" ")[2] for line in lines] == [f"l{k} is back" for k in range(12, 20)]
    assert all(line[2] == line[5] == ":" for line in lines)


def test_a_run_that_has_not_begun_shows_what_it_waits_for() -> None:
    (line,) = status_lines(status(state="waiting", learners=[], versions=[]), 1.0)
    assert line.endswith(" s  waiting for learners")
    assert "the first learner's parameters become the anchors" in drawn(status_view(status(state="seeding")))


def test_the_reason_of_a_suspended_run_is_shown() -> None:
    assert status_lines(status(state="suspended", reason="the disk is full"), 1.0)[0].endswith(
        "suspended (the disk is full): 13 commits, versions 4..5 of 3 fragments, quorum 1, 61.44k tokens, "
        "participation 97.5 %, goodput -, 2.5 MB received, 900 B sent"
    )


@pytest.mark.parametrize(
    ("silent_s", "records_behind", "said"),
    [(0.1, 0, "has all decisions"), (0.1, 2, "2 decisions behind"), (7.2, 2, "silent for 7 s")],
)
def test_the_standby_is_shown_if_there_is_one(silent_s: float, records_behind: int, said: str) -> None:
    standby = {"address": "10.0.0.2:7", "silent_s": silent_s, "waits_s": None, "records_behind": records_behind}
    assert f"standby 10.0.0.2:7 {said}" in drawn(status_view(status(standby=standby)))
    assert "standby" not in drawn(status_view(status(standby=None)))


def test_a_wait_shows_its_subject_start_end_and_consequence() -> None:
    line = "fragment 3, round 17: waiting for l1 for 1.2 s, at most 0.4 s more; then: merge l0"
    assert list(wait_lines(status())) == [line]


def test_a_wait_without_a_start_or_an_end_shows_none() -> None:
    (line,) = wait_lines(status(waits=[{**status()["waits"][0], "since_s": None, "until_s": None}]))
    assert line == "fragment 3, round 17: waiting for l1; then: merge l0"


def test_a_run_without_waits_shows_that_it_waits_for_nobody() -> None:
    assert list(wait_lines(status(waits=[]))) == ["waiting for nobody"]


def test_the_live_table_shows_only_a_few_waits() -> None:
    text = drawn(status_view(status(waits=status()["waits"] * 24), num_waits=2))
    assert text.count("fragment 3") == 2
    assert "and 22 more waits" in text


def test_names_are_not_interpreted_as_markup() -> None:
    learner = {**status()["learners"][0], "id": "[red]x"}
    view = status(learners=[learner])
    assert "[red]x" in drawn(status_view(view))


def test_lines_are_printed_once_a_period() -> None:
    now_s = [0.0]
    console = Console(file=io.StringIO(), width=200)
    with Screen(console, live=False, period_s=5.0, clock=lambda: now_s[0]) as screen:
        for now_s[0] in (0.0, 0.1, 4.9, 5.1, 6.0):
            screen.show(status())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("l0 stepping: step 120, loss 3.2146, 5.123k tokens/s") == 2
    stamps = [line.split(" s  ")[0].strip() for line in text.splitlines() if "l0 stepping" in line]
    assert stamps == ["0.0", "5.1"], "time of this command, whichever syncer answers"


def test_a_silent_syncer_is_reported() -> None:
    console = Console(file=io.StringIO())
    Screen(console, live=False).show(None, "connection refused")
    assert console.file.getvalue() == "no answer from the syncer: connection refused\n"  # type: ignore[attr-defined]


def test_the_live_table_is_drawn_and_messages_stay() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=True, _environ={})
    with Screen(console, live=True) as screen:
        screen.show(status())
        screen.say("l1 died")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3.2146" in text
    assert "l1 died" in text


SUMMARY = {
    "token_unit": "tokens",
    "status": "finished",
    "wall_s": 93.21,
    "fleet_tokens": 1_000_000.0,
    "tokens_seen": 24_000_000,
    "tokens_merged": 23_760_000,
    "tokens_discarded": {"lapsed": 240_000, "refused": 0},
    "tokens_pending": 0,
    "goodput": 0.951,
    "rounds": 700,
    "joins": 2,
    "lapses": 1,
    "bytes_up": 12_000_000,
    "bytes_down": 11_000_000,
    "participation": 0.98,
    "stall_s": {"l0": 0.1234, "l1": None},
    "eval_loss": 2.34567,
}


def test_the_summary_shows_every_figure_and_where_the_files_are() -> None:
    text = drawn(summary_view(SUMMARY, Path("/runs/gpt")))
    assert {cells(text, name)[1] for name in ("status", "wall time", "merged", "discarded", "received")} == {
        "finished",
        "93.2 s",
        "23,760,000 / 24,000,000 token-fragments (99.0 %)",
        "lapsed 240k",
        "12 MB / 11 MB",
    }
    assert cells(text, "stall of l0")[1] == "0.123 s"
    assert cells(text, "stall of l1")[1] == "-"
    assert cells(text, "eval_loss")[1] == "2.3457"
    assert cells(text, "perplexity")[1] == "10.44"
    assert cells(text, "files")[1] == "/runs/gpt"


def test_the_summary_shows_repeated_tokens_if_there_are_any() -> None:
    assert "repeated" not in drawn(summary_view({**SUMMARY, "tokens_repeated": 0}, Path("x")))
    text = drawn(summary_view({**SUMMARY, "tokens_repeated": 2_376_000}, Path("x")))
    assert cells(text, "repeated")[1] == "2,376,000 (10.0 % of merged)"


def test_a_long_run_is_summarized_in_large_units() -> None:
    text = drawn(summary_view({**SUMMARY, "fleet_tokens": 1.5e12, "bytes_up": 25e12}, Path("x")))
    assert cells(text, "tokens")[1] == "1.5T seen by the fleet"
    assert cells(text, "received")[1] == "25 TB / 11 MB"


def test_a_run_that_counts_samples_has_no_perplexity() -> None:
    assert "perplexity" in drawn(summary_view({**SUMMARY, "eval_loss": 0.5}, Path("x")))
    for unit in ("samples", None):
        assert "perplexity" not in drawn(summary_view({**SUMMARY, "eval_loss": 0.5, "token_unit": unit}, Path("x")))


def test_a_loss_that_is_too_large_for_nats_per_token_has_no_perplexity() -> None:
    assert "perplexity" not in drawn(summary_view({**SUMMARY, "eval_loss": 812.5}, Path("x")))


def test_the_summary_of_a_run_without_a_step_is_drawn() -> None:
    empty = {
        **SUMMARY,
        "tokens_seen": 0,
        "tokens_merged": 0,
        "tokens_discarded": {},
        "eval_loss": None,
        "eval_reason": "there is no validation data",
        "goodput": None,
    }
    text = drawn(summary_view({**empty, "stall_s": {}}, Path("x")))
    assert "0 / 0 token-fragments (-)" in text
    assert "perplexity" not in text
    assert cells(text, "eval_loss")[1] == "- (there is no validation data)"
    assert cells(text, "discarded")[1] == "nothing"
