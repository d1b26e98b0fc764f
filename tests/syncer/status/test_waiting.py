"""The waits of a run from its start to its end, read from the real state machine."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.syncer.succession import ALONE_S
from lightning_diloco.syncer.status import report
from tests.protocol.harness import Syncer, confirm, ready


def waits(
    syncer: Syncer,
    disk: tuple[str, float] | None = None,
    end_s: float | None = None,
    standby: Any = None,
    shards: Any = (),
) -> list[tuple[Any, ...]]:
    figures = {"uptime_s": 0.0, "now_s": syncer.now_s, "bytes_up": 0, "bytes_down": 0}
    status = report.status(syncer.state, disk=disk, standby=standby, shards=shards, end_s=end_s, **figures)
    return [(wait["what"], wait["for"], wait["since_s"], wait["until_s"], wait["then"]) for wait in status["waits"]]


@pytest.mark.parametrize(
    ("silent_s", "until_s", "then"),
    [
        (1.0, ALONE_S - 1.0, "commits continue"),
        (ALONE_S + 1.0, 0.0, "commits continue"),
        (ALONE_S + 3.0, None, "commits continue when it returns; if it is lost, restart with --take-over"),
    ],
)
def test_a_standby_is_awaited_until_learners_allow_the_run_to_continue_without_it(
    silent_s: float, until_s: float | None, then: str
) -> None:
    standby = {"address": "h:1", "silent_s": silent_s, "waits_s": 0.5, "records_behind": 1}
    found = waits(Syncer("l0", "l1"), standby=standby)
    assert found == [("the standby at h:1 to have the last decisions on disk", ["the standby"], 0.5, until_s, then)]


def test_only_a_shard_that_is_away_is_awaited() -> None:
    shards = [{"shard": 1, "away_s": None}, {"shard": 2, "away_s": 4.0}]
    found = waits(Syncer("l0", "l1"), shards=shards)
    assert found == [("the fragments of a shard", ["shard 2"], 4.0, None, "their rounds continue")]


def test_an_empty_run_waits_for_a_learner_and_then_for_its_values() -> None:
    syncer = Syncer()
    assert waits(syncer) == [("the start", ["a first learner"], None, None, "its parameters become the anchors")]
    syncer.hello("a", "l0")
    syncer.now_s += 5.0
    ((what, whom, _, until_s, then),) = waits(syncer)
    assert (what, whom, until_s) == ("the start values", ["l0"], 10.0)
    assert "if it is silent, another learner's do" in then


def test_the_first_step_waits_for_the_expected_learners_for_a_minute() -> None:
    syncer = Syncer(expect=3)
    syncer.seed("l0")
    syncer.hello("l1")
    what = "the first step, with 3 learners"
    assert waits(syncer) == [(what, ["l0", "l1"], None, None, "the learners that are ready begin")]
    for session in ("l0", "l1"):
        syncer.tell(session, confirm())
    syncer.now_s += 20.0
    assert waits(syncer)[0] == (what, ["1 more learners"], 20.0, 40.0, "the learners that are ready begin")


def test_there_is_no_wait_without_an_open_round() -> None:
    assert waits(Syncer("l0", "l1")) == []


def test_a_round_below_its_quorum_ends_with_the_quorum_or_long_after_its_time() -> None:
    syncer = Syncer("l0", "l1", "l2", quorum=2)
    syncer.intent("l0")
    syncer.tell("l0", ready())
    syncer.now_s += 0.5
    (wait,) = waits(syncer)
    then = "the round closes with those that are ready, but at least one, if 2 are not ready in time"
    assert wait == ("fragment 0, round 1, collecting", ["l1", "l2"], 0.5, 11.5, then)
    syncer.tell("l1", ready())
    (wait,) = waits(syncer)
    assert wait[1] == ["l2"]
    assert wait[3] == pytest.approx(1.5)  # a step of the opener and the grace of a step, less what has passed
    assert wait[4] == "the round closes with those that are ready"


def test_a_closed_round_waits_for_payloads_then_for_the_merge_and_the_disk() -> None:
    syncer = Syncer("l0", "l1")
    syncer.intent("l0")
    syncer.tell("l0", ready())
    syncer.tell("l1", ready())
    syncer.payload("l1", ready())
    ((what, whom, _, until_s, then),) = waits(syncer)
    assert (what, whom, then) == (
        "fragment 0, round 1, transferring",
        ["l0"],
        "late contributions are held for the next round",
    )
    assert until_s == 2.0
    syncer.payload("l0", ready())
    assert waits(syncer)[0][1:] == (["the merge"], 0.0, None, "the outer gradient is written to disk")
    syncer.merge()
    assert waits(syncer)[0][1:] == (["the disk"], 0.0, None, "the new version is offered to all learners")
    syncer.handle(on.CommitFailed(0, 1, "full"))
    assert waits(syncer, ("full", syncer.now_s - 3.0)) == [
        ("the disk: full", ["the disk"], 3.0, None, "commits continue"),
        ("fragment 0, round 1, suspended", ["the disk"], 0.0, 2.0, "the commit is tried again"),
    ]


def test_a_silent_learner_is_awaited_until_its_lease_ends_and_then_its_return() -> None:
    syncer = Syncer("l0", "l1")
    syncer.now_s += 5.0
    syncer.beat("l0")
    assert waits(syncer) == [("a message from a silent learner", ["l1"], 5.0, 10.0, "it lapses: no round waits for it")]
    syncer.tick(11.0)
    syncer.beat("l0")
    ((what, whom, since_s, until_s, _),) = waits(syncer)
    assert (what, whom, since_s, until_s) == ("the return of a learner that lapsed", ["l1"], 16.0, None)


def test_the_end_waits_for_the_loss_of_the_final_anchor() -> None:
    syncer = Syncer("l0")
    progress = messages.Progress(4, 100, (0, 0), (((0, 100),),) * 2)
    syncer.tell("l0", messages.Leave("finished", progress, 25.0))
    end_s = syncer.now_s + 3600.0
    syncer.now_s += 20.0
    what = "the loss of the final anchor"
    assert waits(syncer, end_s=end_s) == [(what, ["l0"], 20.0, 3580.0, "the run ends without it")]
    assert waits(syncer) == [(what, ["l0"], 20.0, None, "it is in the summary")]
    syncer.tell("l0", messages.Evaluated(2.5))
    assert waits(syncer) == []
