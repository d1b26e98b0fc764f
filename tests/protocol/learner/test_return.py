"""The learner's machine during faults, after a reconnect, and at its end. Fragment 0 is due at step 2, 1 at step 4."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.learner.drain import DRAIN_S, MAX_ASK_S, OUTAGE_S, WAIT_SHARE
from tests.protocol.harness import Learner, of_kind


@pytest.fixture
def learner() -> Learner:
    return Learner()


def welcome(generation: int = 0, version: int = 0, merged: tuple[int, ...] = (0, 0)) -> msg.Welcome:
    return msg.Welcome(1, "r", {}, (generation,) * 2, (version,) * 2, 0, merged)


# ------------------------------------------------------------------------------------------------- trouble and return


def test_a_reconnect_reports_known_versions_and_asks_for_every_fate(learner: Learner) -> None:
    learner.snapshot()
    learner.handle(on.UploadFailed(0, 1))
    known = (msg.Mark(0, 0, "x"), msg.Mark(0, 0, "y"))
    learner.handle(on.Reconnected(2, known))
    assert (learner.says[0].known, learner.says[0].connection) == (known, 2)

    learner.hear(welcome())
    assert msg.AskFate(0, 1) in learner.says


def test_a_new_generation_books_lost_merges_and_drops_outstanding_contributions(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 1, seq=1)
    learner.land(0, 1, seq=1)  # 10 tokens of fragment 0 are merged and landed
    learner.snapshot(1, 2)
    assert learner.books() == (60, 60)

    learner.hear(welcome(generation=1, version=0))
    assert [f.fragment for f in of_kind(learner.actions, do.Fetch)] == [0, 1]
    assert all(f.adopt for f in of_kind(learner.actions, do.Fetch))
    assert learner.state.discarded == {"restored": 10 + 30}
    assert learner.state.progress.landed == (0, 0)
    assert learner.books() == (60, 60)

    for p in (0, 1):
        learner.land(p, 0, is_full=True)
    assert learner.books() == (100, 100)
    assert learner.state.progress.pending == (((40, 50),), ())


def test_versions_that_landed_after_the_last_hello_are_proved_by_another_hello(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 1, seq=1)
    learner.land(0, 1, seq=1)
    learner.hear(welcome(version=1))
    assert of_kind(learner.actions, do.SayHello) == []

    learner.hear(welcome(version=0))
    assert of_kind(learner.actions, do.SayHello) == [do.SayHello()]


def test_merges_that_survived_a_rollback_are_not_booked_as_lost(learner: Learner) -> None:
    learner.snapshot()
    learner.hear(welcome(generation=1, version=1, merged=(10, 0)))  # the outstanding contribution is in version 1

    assert learner.state.discarded == {}
    assert learner.books() == (20, 20)


def test_a_generation_that_is_rolled_back_before_a_fragment_has_adopted_it_is_begun_again(learner: Learner) -> None:
    """Its disk lost records twice: the number of the generation is the same, but fewer contributions survived."""
    learner.snapshot()
    learner.snapshot(1, 2)
    learner.hear(welcome(generation=1, version=1, merged=(10, 10)))
    learner.land(0, 1, is_full=True)
    learner.hear(msg.Welcome(1, "r", {}, (1, 1), (1, 0), 0, (10, 0)))

    assert [f.merged_tokens for f in learner.state.fragments] == [10, 0]
    assert learner.state.fragments[1].landed == 0
    assert of_kind(learner.land(1, 1, is_full=True), do.Land) == [], "it was fetched before"
    assert [f.fragment for f in of_kind(learner.handle(on.Tick()), do.Fetch)] == [1]
    assert of_kind(learner.land(1, 0, is_full=True), do.Land) != []
    seen, accounted = learner.books()
    assert seen == accounted


def test_a_newer_backup_takes_back_what_an_older_one_had_lost(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 1, seq=1)
    learner.land(0, 1, seq=1)
    learner.hear(welcome(generation=1, version=0))
    assert learner.state.progress.discarded == {"restored": 10}
    for p in (0, 1):
        learner.land(p, 0, is_full=True)
    lost = learner.state.progress.discarded["restored"]  # with the progress that the older anchors have replaced
    learner.hear(welcome(generation=2, version=1, merged=(10, 0)))
    assert learner.state.progress.discarded == {"restored": lost - 10}
    for p in (0, 1):
        learner.land(p, 1, is_full=True)
    learner.step()
    seen, accounted = learner.books()
    assert seen == accounted


def test_messages_of_an_older_generation_are_ignored(learner: Learner) -> None:
    learner.hear(welcome(generation=1))
    learner.hear(msg.Commit(0, 0, 9, ()))
    assert learner.state.fragments[0].offered == 0

    learner.handle(on.Staged(0, 0, 9, None, True))
    assert of_kind(learner.step(), do.Land) == []


def test_being_fenced_off_stops_the_learner(learner: Learner) -> None:
    assert learner.hear(msg.Rejected("fenced", "replaced")) == [do.Fail("FencedError", "replaced")]


def test_a_late_seed_grant_changes_nothing(learner: Learner) -> None:
    assert learner.hear(msg.SeedGrant(1, 1, "r", {})) == []


def test_a_loss_that_is_not_finite_does_not_stop_heartbeats(learner: Learner) -> None:
    learner.state.metrics = {"loss": float("nan"), "stall_s": 0.5}
    learner.handle(on.Tick())

    assert learner.says[0].metrics == {"stall_s": 0.5}


# ----------------------------------------------------------------------------------------------------------- the end


def test_a_draining_learner_asks_for_its_remaining_rounds_and_leaves_after_they_land(learner: Learner) -> None:
    learner.step()
    learner.handle(on.Finish("finished"))
    assert learner.says[1:] == [msg.Intent(0, 0.0, 30.0), msg.Intent(1, 0.0, 30.0)]  # of 60 s to drain

    for p in (0, 1):
        learner.hear(msg.Announce(p, 1 + p))
    readies = of_kind(learner.handle(on.Pause()), do.Snapshot)
    for p in (0, 1):
        learner.handle(on.Encoded(p, 1))
        learner.commit(p, 1, seq=1)
        learner.handle(on.Staged(p, 0, 1, 1))
    assert [r.ready.tokens for r in readies] == [10, 10]

    learner.handle(on.Pause())
    (leave,) = [m for m in learner.says if isinstance(m, msg.Leave)]
    assert leave.progress.pending == ((), ())
    assert learner.handle(on.Tick()) == [do.Say(leave)]
    assert learner.hear(msg.LeaveNoted(True)) == [do.Left(True)]
    assert learner.handle(on.Tick()) == []


def test_a_draining_learner_asks_less_and_less_often_until_its_patience_ends() -> None:
    learner = Learner(num_fragments=2)
    learner.step()
    learner.handle(on.Finish("finished"))
    asked = []
    while learner.now_s < 100.0 + 1.0 + DRAIN_S - 1.0:
        learner.handle(on.Pause(), after_s=0.1)
        asked += [(learner.now_s, said.patience_s) for said in learner.says if isinstance(said, msg.Intent)]
    waiting = [at_s for at_s, patience_s in asked if patience_s > 0]
    assert len(waiting) <= 2 * (6 + 30.0 / MAX_ASK_S), "of 600"
    alone = next(at_s for at_s, patience_s in asked if patience_s == 0)
    assert alone == pytest.approx(101.0 + WAIT_SHARE * DRAIN_S, abs=0.11)


def test_a_draining_learner_waits_for_its_update_without_asking_for_rounds(learner: Learner) -> None:
    learner.step()
    learner.snapshot(0)
    learner.snapshot(1, 2)
    learner.commit(0, 1, seq=1)
    learner.commit(1, 1, seq=1)
    learner.handle(on.Finish("finished"))
    learner.handle(on.Pause())

    assert [m for m in learner.says if isinstance(m, msg.Intent)] == []


def test_a_drain_that_takes_too_long_ends_with_exact_accounts() -> None:
    learner = Learner(drain_s=5.0)
    learner.step()
    learner.handle(on.Finish("preempted"))
    learner.handle(on.Pause(), after_s=6.0)

    (leave,) = learner.says
    assert (leave.reason, leave.progress.pending) == ("preempted", (((0, 10),), ((0, 10),)))


def left(learner: Learner) -> bool:
    return any(isinstance(message, msg.Leave) for message in learner.says)


def test_a_drain_continues_while_its_contributions_advance() -> None:
    """Each contribution takes less than the wait; all together take three times as long."""
    learner = Learner()
    learner.step()
    learner.handle(on.Finish("finished"))
    for p in (0, 1):
        learner.hear(msg.Announce(p, 1))
        learner.handle(on.Pause(), after_s=DRAIN_S - 1)
        assert not left(learner)
        learner.handle(on.Encoded(p, 1))
        learner.handle(on.Uploaded(p, 1))
        learner.handle(on.Uploaded(p, 1), after_s=1.0)  # a repetition is no progress
        learner.handle(on.Pause(), after_s=DRAIN_S - 3)
        assert not left(learner)
        learner.commit(p, 1, seq=1)
        learner.handle(on.Staged(p, 0, 1, 1), after_s=DRAIN_S - 1)
        learner.handle(on.Pause())
    assert left(learner)
    assert learner.state.progress.pending == ((), ())
    assert learner.books() == (20, 20)


def test_a_drain_waits_ten_minutes_for_a_syncer_that_is_away() -> None:
    learner = Learner(num_fragments=1, sync_every=4)
    learner.step()
    learner.handle(on.Finish("finished"))
    for _ in range(int(OUTAGE_S / 50.0)):
        learner.handle(on.Pause(is_online=False), after_s=50.0)
        assert not left(learner)
    # The syncer is back, and each stage takes nearly as long as allowed.
    learner.hear(msg.Announce(0, 1))
    learner.handle(on.Pause(), after_s=DRAIN_S - 1 - 50.0)
    learner.handle(on.Encoded(0, 1))
    learner.handle(on.Uploaded(0, 1))
    learner.commit(0, 1, seq=1)
    learner.handle(on.Staged(0, 0, 1, 1), after_s=DRAIN_S - 1)
    learner.handle(on.Pause())
    assert left(learner)
    assert learner.state.progress.pending == ((),)


@pytest.mark.parametrize(("options", "asked"), [({"drain_s": 7.0}, {}), ({}, {"within_s": 4.0})])
def test_a_drain_with_a_limit_does_not_wait_for_a_syncer_that_is_away(options: dict, asked: dict) -> None:
    learner = Learner(num_fragments=1, sync_every=4, **options)
    learner.step()
    learner.handle(on.Finish("preempted", **asked))
    learner.handle(on.Pause(is_online=False), after_s=1.0)
    assert not left(learner)
    ends_s = learner.state.drain_until_s
    learner.handle(on.Pause(is_online=False), after_s=7.0)
    assert left(learner)
    assert learner.state.drain_until_s == ends_s, "nobody waits longer for an answer, either"


def test_a_preemption_during_the_drain_sets_another_limit_and_reason() -> None:
    learner = Learner(num_fragments=1, sync_every=4)
    learner.step()
    learner.handle(on.Finish("finished"))
    learner.handle(on.Pause(is_online=False), after_s=1.0)
    learner.handle(on.Finish("preempted", within_s=4.0))
    learner.handle(on.Pause(is_online=False), after_s=3.9)
    assert not left(learner)
    learner.handle(on.Pause(is_online=False), after_s=0.2)
    (leave,) = (message for message in learner.says if isinstance(message, msg.Leave))
    assert leave.reason == "preempted"


def test_a_learner_with_nothing_to_send_does_not_wait_for_a_syncer_that_is_away() -> None:
    learner = Learner(num_fragments=1, sync_every=4)
    learner.handle(on.Finish("finished"))
    assert left(learner)
    ends_s = learner.state.drain_until_s
    for _ in range(10):
        learner.handle(on.Pause(is_online=False), after_s=DRAIN_S)
    assert learner.state.drain_until_s == ends_s


def test_a_drain_does_not_wait_longer_than_ten_minutes() -> None:
    learner = Learner(num_fragments=1, sync_every=4)
    learner.step()
    learner.handle(on.Finish("finished"))
    begun_s = learner.now_s
    while not left(learner):
        learner.handle(on.Pause(is_online=False), after_s=10.0)
    assert OUTAGE_S <= learner.now_s - begun_s <= OUTAGE_S + DRAIN_S + 10.0


def test_a_drain_ends_if_only_contributions_of_others_advance() -> None:
    learner = Learner(num_fragments=1, sync_every=4)
    learner.step()
    learner.handle(on.Finish("finished"))
    for version in range(1, 6):
        assert not left(learner)
        learner.commit(0, version)
        learner.handle(on.Staged(0, 0, version, None))
        learner.handle(on.Pause(), after_s=DRAIN_S / 5)
    assert left(learner)
    assert learner.state.progress.pending == (((0, 10),),)


def test_the_wait_of_a_drain_follows_the_duration_of_rounds_and_an_option_limits_it() -> None:
    def drained(round_s: float, **options: Any) -> tuple[float, Learner]:
        learner = Learner(num_fragments=1, **options)
        for version in range(1, 4):
            learner.snapshot(0, version)
            learner.commit(0, version, seq=version)
            learner.now_s += round_s
            learner.land(0, version, version)
        learner.handle(on.Finish("finished"))
        return learner.state.drain_until_s - learner.now_s, learner

    assert drained(1.0)[0] == DRAIN_S
    assert drained(200.0)[0] == pytest.approx(3 * 200.0, rel=0.02)
    assert drained(200.0, drain_s=7.0)[0] == 7.0
    assert drained(200.0, drain_s=0.0)[0] == 0.0
    learner = Learner(transfer_s=50.0)
    learner.step()
    learner.handle(on.Finish("finished"))
    assert learner.state.drain_until_s - learner.now_s == 150.0
    learner = Learner(transfer_s=50.0)
    learner.step()
    learner.handle(on.Finish("preempted", within_s=4.0))
    assert learner.state.drain_until_s - learner.now_s == 4.0


def test_nothing_is_snapshotted_or_landed_after_the_leave_was_sent() -> None:
    learner = Learner(drain_s=0.0)
    learner.step()
    learner.handle(on.Finish("failed", drain=False))
    learner.hear(msg.Announce(0, 1))
    learner.commit(1, 1)
    learner.handle(on.Staged(1, 0, 1, None))

    assert learner.handle(on.Pause()) == []


def test_a_staged_update_does_not_land_if_the_learner_leaves_at_once() -> None:
    learner = Learner()
    learner.step()
    learner.commit(1, 1)
    learner.handle(on.Staged(1, 0, 1, None))

    assert of_kind(learner.handle(on.Finish("failed", drain=False)), do.Land) == []
    assert of_kind(learner.handle(on.Pause()), do.Land) == []


@pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
def test_the_accounts_balance_after_every_event(align: str) -> None:
    learner = Learner(align=align)
    for version in range(1, 8):
        learner.snapshot(0, version)
        assert learner.books()[0] == learner.books()[1]
        seq = learner.state.fragments[0].seq if version % 2 else None
        learner.commit(0, version, seq=seq)
        learner.land(0, version, seq)
        if seq is None:
            learner.hear(msg.FateIs(0, learner.state.fragments[0].seq, "superseded"))
        assert learner.books()[0] == learner.books()[1]


# --------------------------------------------------------------------------------------------------------- quarantine


def test_quarantine_causes_one_warning_and_does_not_stop_the_learner(learner: Learner) -> None:
    told = []
    for seq in range(1, 6):
        learner.snapshot(0, seq)
        learner.hear(msg.FateIs(0, seq, "quarantined", reason="its norm is 1e+30"))
        told += of_kind(learner.actions, do.Warn)
        assert of_kind(learner.actions, do.Fail) == []
        (fetch,) = of_kind(learner.actions, do.Fetch)
        assert fetch.adopt
        learner.land(0, seq, is_full=True)

    (warning,) = told
    assert "quarantine" in warning.text
    assert "its norm is 1e+30" in warning.text
    assert learner.state.discarded["refused"] > 0
    assert learner.books()[0] == learner.books()[1]
