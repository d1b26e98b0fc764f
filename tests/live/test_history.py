"""Bounded curves and events, from a tape and from answers; silence and the end of a run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from lightning_diloco.live.history import MAX_EVENTS, MAX_ROWS, Curves, Events, sentence
from lightning_diloco.live.watch import Watch
from lightning_diloco.syncer.status.progress import progress
from lightning_diloco.syncer.status.publisher import TOLD
from tests.live.told import START, learner, status


def test_a_long_run_is_covered_at_a_lower_resolution() -> None:
    curves = Curves()
    for second in range(20_000):
        curves.add(START + second, status(second))
    times = [row["t"] - START for row in curves.rows]
    assert len(times) < MAX_ROWS
    assert times[0] == 0.0
    assert times[-1] > 19_800
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 20_000 / 60


def test_a_row_has_the_losses_of_learners_and_of_the_anchor() -> None:
    curves = Curves()
    curves.add(START, status(10, learner("l0", 10, loss=3.5, eval_loss=3.25), learner("l1", 10)))
    assert curves.rows[0]["losses"] == {"l0": [3.5, 3.25], "l1": [None, None]}


def test_a_note_of_the_tape_gives_the_same_row_as_its_status() -> None:
    told, one, two = status(10, learner("l0", 10, loss=3.5, eval_loss=3.25)), Curves(), Curves()
    one.add(START, told)
    two.add(START, progress(told))
    assert one.rows == two.rows


def test_events_are_shown_once_and_in_order() -> None:
    events = Events()
    lapse = {"t": START, "event": "lapse", "learner": "l1", "silent_s": 15.04}
    back = {"t": START + 2, "event": "return", "learner": "l1"}
    events.add([lapse])
    events.add([lapse, {"t": START + 1, "event": "progress"}, back])
    assert [(event["level"], event["text"]) for event in events.latest] == [
        ("bad", "l1 lapsed after 15.0 s of silence; the others continue"),
        ("good", "l1 is back"),
    ]
    for number in range(2 * MAX_EVENTS):
        events.say(START, f"line {number}\nand more")
    assert (len(events.latest), events.latest[-1]["text"]) == (MAX_EVENTS, f"line {2 * MAX_EVENTS - 1}")


def test_an_event_of_tape_and_answer_with_different_stamps_is_shown_once() -> None:
    events = Events()
    lapses = [{"t": START, "event": "lapse", "learner": f"l{k}", "silent_s": 15.0} for k in range(3)]
    on_tape = [{**lapse, "t": START - 1e-6 * k} for k, lapse in enumerate(lapses)]
    events.add(on_tape)
    events.add([{**lapse, "t": START + 1e-3, "number": k} for k, lapse in enumerate(lapses)])
    events.add([{**lapses[0], "t": START + 60}])
    events.add(on_tape)
    assert [event["text"][:9] for event in events.latest] == ["l0 lapsed", "l1 lapsed", "l2 lapsed", "l0 lapsed"]


def test_the_death_of_a_process_has_the_level_bad() -> None:
    events = Events()
    events.say(START, "l1 died (signal SIGKILL); restart 1 of 3")
    events.say(START, "l0 finished")
    assert [event["level"] for event in events.latest] == ["bad", "info"]


def test_every_shown_event_has_a_sentence() -> None:
    fields = {
        "t": START, "learner": "l0", "incarnation": 2, "reason": "finished", "silent_s": 1.0, "text": "no",
        "eval_loss": 2.5, "fragment": 1, "for_s": 2.0, "snapshot_lsn": 40, "num_records": 1, "address": "b:4000",
        "primary": "a:4000", "reign": 2, "standby": "c:4000", "shard": 1,
    }  # fmt: skip
    told = {event: sentence({**fields, "event": event}) for event in TOLD}
    assert None not in told.values(), told
    assert told["restarted"] == (
        "info",
        "the syncer started with its state on disk: a snapshot and 1 record of the log",
    )
    assert told["took over"] == ("warn", "the syncer at b:4000 took over from a:4000, takeover 2 of the run")
    assert sentence({**fields, "event": "restarted", "snapshot_lsn": None, "num_records": 3}) == (
        "info",
        "the syncer started with its state on disk: 3 records of the log",
    )
    assert sentence({**fields, "event": "join"}) == ("good", "l0 joined again, as incarnation 2")
    assert sentence({**fields, "event": "evaluated", "eval_loss": None}) == (
        "warn",
        "the final anchor has no loss: finished",
    )


def test_the_past_comes_from_the_tape_and_later_rows_from_answers(tmp_path: Path) -> None:
    lines = [
        {"t": START, "event": "join", "lsn": 1, "learner": "l0", "incarnation": 1, "where": "here"},
        {"t": START + 1, "event": "progress", "lsn": 1, **progress(status(10))},
    ]
    (tmp_path / "tape").mkdir()
    (tmp_path / "tape" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = [START + 5.0]
    watch = Watch("folder", clock=lambda: now[0])
    watch.read_past(tmp_path)
    watch.saw(status(20, recent=[lines[0], {"t": START + 4, "event": "lapse", "learner": "l0", "silent_s": 9.0}]))
    state = watch.state()
    assert [row["t"] for row in state["rows"]] == [START + 1, START + 5]
    assert [event["text"][:9] for event in state["events"]] == ["l0 joined", "l0 lapsed"]
    assert state["run"] == "gpt-20261120-abc123"


def test_a_silent_syncer_keeps_its_last_answer_but_gives_no_status() -> None:
    now = [START]
    watch = Watch("folder", clock=lambda: now[0])
    assert (watch.state()["run"], watch.status) == ("folder", None)
    watch.saw(first := status(10))
    assert watch.status is first
    now[0] += 12
    watch.saw(None, "connection refused")
    state = watch.state()
    assert (state["problem"], state["answered"], state["now"] - state["answered"]) == ("connection refused", START, 12)
    assert state["status"] is first
    assert watch.status is None
    watch.saw(second := status(20))
    assert (watch.status, watch.state()["problem"]) == (second, None)


def test_a_run_that_ended_has_a_summary_and_no_status() -> None:
    watch = Watch("folder")
    watch.saw(status(10))
    watch.ended({"status": "finished", "run": "r"})
    assert watch.state()["summary"]["status"] == "finished"
    assert watch.status is None
