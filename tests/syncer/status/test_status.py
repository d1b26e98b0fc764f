"""The status for users and the news for learners, from a real service."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.messages import News
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer import run_end
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.status.publisher import NUM_RECENT, StatusPublisher
from tests.learner.fleet import Fleet, finish, until


def test_learners_receive_the_size_of_the_fleet_and_their_own_cosine(tmp_path: Path) -> None:
    with Fleet(tmp_path, expect=2) as fleet:
        one, two = (fleet.learner(name).go() for name in ("l0", "l1"))
        fleet.until_commits(3)
        until(lambda: one.link.standing().num_learners == 2 and one.link.metrics()["fleet_tokens"] > 0, "news")
        until(lambda: "diloco/cosine" in one.link.metrics(), "news of a merge")
        metrics, standing = one.link.metrics(), one.link.standing()
        assert metrics["fleet/learners"] == standing.num_learners == 2
        assert 0 < metrics["fleet_tokens"] <= fleet.service.state.ledger.totals().seen
        assert abs(metrics["diloco/cosine"]) <= 1 + 1e-6  # up to rounding
        assert metrics["diloco/bytes_up"] > 0
        assert metrics["diloco/bytes_down"] > 0
        assert standing.offline_s is None
        one.wire.is_cut = True
        until(lambda: one.link.standing().offline_s, "being offline")
        one.wire.is_cut = False
        until(lambda: one.link.standing().offline_s is None, "being back")
        finish(one, two)
        told = [(event["event"], event.get("learner")) for event in fleet.status()["recent"]]
    assert told[0] == ("seeded", None)
    assert {("join", "l0"), ("join", "l1"), ("leave", "l0"), ("leave", "l1")} < set(told)
    outer = [line for line in read_tape(tmp_path / "tape" / "events.jsonl") if line["event"] == "outer"]
    assert len(outer) == fleet.num_commits
    assert all(0.4 <= line["lr"] < 1 for line in outer), "the automatic learning rate"
    assert all(line["merged_norm"] > 0 and len(line["norms"]) == len(line["cosines"]) for line in outer)


def test_a_single_contribution_has_the_direction_of_the_outer_gradient(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        learner = fleet.learner("l0").go()
        fleet.until_commits(2)
        until(lambda: learner.link.metrics().get("diloco/cosine"), "news of a merge")
        assert learner.link.metrics()["diloco/cosine"] == pytest.approx(1.0, abs=1e-4)
        learner.enough().done()


@pytest.mark.parametrize(("expect", "then"), [(1, "the run ends without it"), (None, "it is in the summary")])
def test_the_wait_for_the_last_validation_is_shown(
    tmp_path: Path, expect: int | None, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_end, "EVALUATE_WAIT_S", 7000.0)
    with Fleet(tmp_path, expect=expect) as fleet:
        learner = fleet.learner("l0").join()
        assert learner.link.finish(), "it is the last one, and validates now"
        (wait,) = fleet.status()["waits"]
    assert wait["then"] == then
    assert wait["until_s"] == (None if expect is None else pytest.approx(7000.0, abs=100.0))


def test_only_the_latest_events_are_kept_and_numbers_increase() -> None:
    board = StatusPublisher(SyncerState(run="r"), Payloads())
    board.noted("commit", {"fragment": 1})
    for _ in range(NUM_RECENT + 5):
        board.noted("lapse", {"learner": "l0"})
    recent = board.status()["recent"]
    assert (len(recent), recent[0]["number"], recent[-1]["number"]) == (NUM_RECENT, 5, NUM_RECENT + 4)


def test_a_disk_that_fails_and_works_again_is_logged_once_each() -> None:
    board = StatusPublisher(SyncerState(run="r"), Payloads())
    board.disk_works()
    for _ in range(3):
        board.disk_failed("full")
    assert board.status()["reason"] == "full"
    board.disk_works()
    assert [event["event"] for event in board.status()["recent"]] == ["suspended", "resumed"]
    assert board.status()["state"] == "waiting"


def test_news_with_other_fields_is_refused() -> None:
    assert codec.load(News, {}) == News()
    with pytest.raises(CorruptMessageError):
        codec.load(News, {"num_learners": "2"})
