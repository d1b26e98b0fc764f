"""Rounds at the syncer: when they open, which learners they wait for, when they close, and what they merge."""

from __future__ import annotations

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.round import NEXT, Round
from lightning_diloco.protocol.syncer.rounds import MAX_PATIENCE_S
from tests.protocol.harness import Syncer, members, of_kind, ready, said


@pytest.fixture
def syncer() -> Syncer:
    return Syncer("a", "b")


# ----------------------------------------------------------------------------------------------------------- opening


def test_the_first_intent_opens_a_round_which_is_announced_to_all_at_once(syncer: Syncer) -> None:
    actions = syncer.intent("a")

    assert said(actions, "a") == said(actions, "b") == [msg.Announce(0, 1)]
    assert syncer.round().electorate == {"a", "b"}


def test_a_second_intent_does_not_open_a_second_round(syncer: Syncer) -> None:
    syncer.intent("a")
    actions = syncer.intent("b")

    assert said(actions, "b") == [msg.Announce(0, 1)]
    assert said(actions, "a") == []


def test_fragments_have_rounds_of_their_own(syncer: Syncer) -> None:
    syncer.intent("a", 0)

    assert said(syncer.intent("a", 1), "b") == [msg.Announce(1, 2)]


def test_learners_that_do_not_step_get_the_announcement_but_rounds_do_not_wait_for_them(syncer: Syncer) -> None:
    syncer.beat("b", phase="evaluating")
    assert said(syncer.intent("a"), "b") == [msg.Announce(0, 1)]
    assert syncer.round().electorate == {"a"}


def test_rounds_do_not_wait_for_a_learner_without_a_step(syncer: Syncer) -> None:
    syncer.join("c")
    syncer.intent("a")

    assert syncer.round().electorate == {"a", "b"}


def test_rounds_wait_for_a_draining_learner_although_it_does_not_step(syncer: Syncer) -> None:
    syncer.beat("b", phase="draining")
    syncer.now_s += 12.0
    syncer.intent("a")

    assert syncer.round().electorate == {"a", "b"}


@pytest.mark.parametrize(("patience_s", "opens"), [(20.0, False), (0.0, True)])
def test_a_draining_learner_waits_for_evaluating_learners_up_to_its_patience(
    syncer: Syncer, patience_s: float, opens: bool
) -> None:
    """In separate rounds, each learner would move the anchor by all of its work; together they move it by the mean."""
    syncer.beat("a", phase="draining")
    syncer.beat("b", phase="evaluating")
    syncer.tell("a", msg.Intent(0, 1.0, patience_s))

    assert (syncer.round() is not None) == opens


def test_patience_of_a_learner_that_does_not_drain_is_ignored(syncer: Syncer) -> None:
    """A learner that asked for patience at every step, and never answered, stalled every round that it opened."""
    syncer.tell("a", msg.Intent(0, 1.0, 60.0))
    syncer.tell("b", ready(stop=10))
    syncer.tick(3.0)

    assert syncer.round().stage != "collecting"


def test_the_round_of_a_draining_learner_opens_when_no_learner_evaluates_without_another_intent(syncer: Syncer) -> None:
    syncer.beat("a", tokens=120, phase="draining")
    syncer.beat("b", phase="evaluating")
    syncer.tell("a", msg.Intent(0, 1.0, 20.0))
    assert not said(syncer.tick(1.0), "a", msg.Announce)
    syncer.beat("b")
    assert said(syncer.tick(), "a", msg.Announce)


def test_an_intent_of_a_learner_that_has_lapsed_opens_no_round(syncer: Syncer) -> None:
    syncer.beat("a", tokens=120, phase="draining")
    syncer.beat("b", phase="evaluating")
    syncer.tell("a", msg.Intent(0, 1.0, 20.0))
    syncer.tick(syncer.config.lease_s + 1.0)
    assert not syncer.state.roster["a"].is_live
    assert syncer.round() is None


def test_learners_that_end_together_are_merged_together_after_evaluating(syncer: Syncer) -> None:
    syncer.beat("a", phase="draining")
    syncer.beat("b", phase="evaluating")
    syncer.tell("a", msg.Intent(0, 1.0, 20.0))
    syncer.beat("b", phase="draining")
    syncer.tell("a", msg.Intent(0, 1.0, 19.0))
    for name in ("a", "b"):
        syncer.contribute(name, ready())
    syncer.commit()

    assert {merge.session for merge in syncer.log[-1].merges} == {"a", "b"}


def test_the_round_of_a_draining_learner_waits_for_all_up_to_its_patience(syncer: Syncer) -> None:
    syncer.beat("a", phase="draining")
    syncer.tell("a", msg.Intent(0, 1.0, 5.0))
    syncer.contribute("a", ready())
    syncer.tick(4.9)
    assert syncer.round().stage == "collecting"

    syncer.beat("b")
    syncer.tick(0.2)
    assert syncer.round().stage == "merging"


def test_patience_is_limited(syncer: Syncer) -> None:
    syncer.beat("a", tokens=120, phase="draining")
    syncer.tell("a", msg.Intent(0, 1.0, 1e300))

    assert syncer.round().until_s == pytest.approx(syncer.now_s + MAX_PATIENCE_S)


def test_patience_ends_a_minute_after_the_start_of_the_drain_whatever_the_learner_reports(syncer: Syncer) -> None:
    """A learner that drained for ever, and never answered, stalled every round that it opened."""
    syncer.beat("a", tokens=120, phase="draining")
    syncer.tick(MAX_PATIENCE_S - 1.0)
    for name in ("a", "b"):
        syncer.beat(name, tokens=120)
    syncer.beat("a", tokens=120, phase="draining")
    syncer.tell("a", msg.Intent(0, 1.0, 60.0))
    syncer.tell("b", ready(stop=10))
    syncer.tick(3.0)

    assert syncer.round().stage != "collecting"


def test_a_draining_learner_does_not_wait_for_an_evaluating_learner_that_lapsed(syncer: Syncer) -> None:
    syncer.beat("b", phase="evaluating")
    syncer.now_s += 60.0
    syncer.beat("a", phase="draining")
    syncer.tick()
    syncer.tell("a", msg.Intent(0, 1.0, 20.0))

    assert syncer.round() is not None


@pytest.mark.parametrize(("tokens", "opens"), [(100, False), (120, True)])
def test_a_draining_learner_opens_a_round_only_for_unmerged_tokens(syncer: Syncer, tokens: int, opens: bool) -> None:
    """It asks at every boundary, and again before it has received the commit."""
    syncer.full_round(0, a=ready())
    syncer.beat("a", tokens=tokens, phase="draining")

    assert bool(said(syncer.intent("a"), "b", msg.Announce)) == opens
    assert said(syncer.intent("a", 1), "b", msg.Announce), "nothing of the other fragment was merged"


def test_an_unanswered_announcement_is_repeated() -> None:
    syncer = Syncer("a", "b", grace=60.0)
    syncer.intent("a")
    syncer.tell("a", ready())

    assert said(syncer.tick(1.9), "b") == []
    actions = syncer.tick(0.1)
    assert said(actions, "a") == []
    assert said(actions, "b") == [msg.Announce(0, 1)]


# ----------------------------------------------------------------------------------------------------------- closing


def test_membership_closes_when_everyone_has_answered(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    assert syncer.round().stage == "collecting"

    assert members(syncer.contribute("b", ready(stop=80))) == ["a", "b"]


def test_a_decline_is_an_answer(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())

    assert members(syncer.tell("b", msg.Decline(0, 1))) == ["a"]


def test_a_decline_of_an_older_round_is_not(syncer: Syncer) -> None:
    syncer.full_round(0, a=ready(), b=ready())
    syncer.intent("a")
    syncer.tell("b", msg.Decline(0, 1))

    assert syncer.round().electorate == {"a", "b"}


@pytest.mark.parametrize("long_step_s", [0.0, 1.0, 2.0])  # 0: not known
def test_a_round_with_a_quorum_waits_for_a_long_step_and_the_grace_window(long_step_s: float) -> None:
    """With unequal steps, many learners are further from their next boundary than a usual step."""
    syncer = Syncer("a", "b", grace=2.0)
    syncer.tell("a", msg.Intent(0, 1.0, long_step_s=long_step_s))
    syncer.contribute("a", ready())
    assert of_kind(syncer.tick(max(1.0, long_step_s) + 1.9), do.Merge) == []

    assert members(syncer.tick(0.2)) == ["a"]


def test_an_unmet_quorum_waits_past_the_grace() -> None:
    syncer = Syncer("a", "b", "c", grace=0.0, quorum=2)
    syncer.intent("a")
    syncer.contribute("a", ready())
    for _ in range(4):
        assert of_kind(syncer.tick(1.0), do.Merge) == []
        syncer.beat("b")
        syncer.beat("c")
    assert members(syncer.contribute("b", ready())) == ["a", "b"]


def test_a_quorum_that_was_met_and_lost_again_does_not_close_the_round() -> None:
    syncer = Syncer("a", "b", "c", "d", grace=30.0, quorum=2)
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.tell("b", ready())
    for _ in range(10):  # b falls silent, its payload never comes, and it lapses before the grace is over
        syncer.tick(4.0)
        for session in "acd":
            syncer.beat(session, step=int(syncer.now_s))
    assert syncer.state.roster["b"].is_lapsed
    assert syncer.round().stage == "collecting"

    assert members(syncer.contribute("c", ready())) == ["a", "c"]


def test_the_quorum_is_lowered_to_the_number_of_present_learners() -> None:
    syncer = Syncer("a", quorum=3)
    syncer.intent("a")

    actions = syncer.contribute("a", ready())
    assert members(actions) == ["a"]


def test_a_stalled_learner_is_dropped_from_the_round(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.beat("b")  # alive, but without a further step
    actions = []
    for _ in range(8):
        syncer.now_s += 1.0
        actions += syncer.beat("b")
    assert members(actions) == ["a"]


def test_a_round_without_contributions_ends_without_a_version(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.tell("a", msg.Decline(0, 1))
    actions = syncer.tell("b", msg.Decline(0, 1))

    assert [note.event for note in of_kind(actions, do.Note)] == ["abort"]
    assert (syncer.round(), syncer.version()) == (None, 0)


def test_an_intent_after_membership_closed_opens_the_next_round(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.tell("b", msg.Decline(0, 1))
    syncer.intent("b")

    assert said(syncer.commit(), "b", msg.Announce) == [msg.Announce(0, 2)]


# ------------------------------------------------------------------------------------------------- transfer and merge


def test_a_payload_that_misses_the_deadline_is_held_for_the_next_round(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.tell("b", ready(stop=80))
    syncer.contribute("a", ready())
    assert members(syncer.tick(3.0)) == ["a"]
    commit = said(syncer.commit(), "b", msg.Commit)
    assert [c.learner for c in commit[0].contributors] == ["a"]

    syncer.payload("b", ready(stop=80))
    assert said(syncer.tell("b", msg.AskFate(0, 1)), "b") == [msg.FateIs(0, 1, "held")]
    syncer.intent("a")
    assert members(syncer.tell("a", msg.Decline(0, 2))) == ["b"]
    syncer.commit()
    assert syncer.version() == 2


def test_a_round_without_a_payload_ends_without_a_version(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.tell("a", ready())
    syncer.tell("b", ready())
    syncer.tick(5.0)

    assert (syncer.round(), syncer.version()) == (None, 0)


def test_a_round_does_not_wait_for_a_learner_that_dies_during_the_transfer(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.tell("b", ready())
    syncer.contribute("a", ready())
    syncer.state.rounds.transfer_s.add(100.0)  # the deadline is far away
    syncer.round().until_s = syncer.now_s + 100
    syncer.now_s += 10.0
    syncer.beat("a", step=9)

    assert members(syncer.tick(6.0)) == ["a"]


def commits(syncer: Syncer) -> list[records.CommitRecord]:
    return [record for record in syncer.log if isinstance(record, records.CommitRecord)]


def test_shares_are_of_the_work_of_all_learners_in_or_outside_of_the_round() -> None:
    syncer = Syncer("a", "b", "c")
    syncer.beat("b", tokens=400, step=8)  # twice the tokens per step
    for session in "abc":
        syncer.state.roster[session].step_s = 1.0
    syncer.full_round(0, a=ready(), b=ready(stop=200), c=ready())
    syncer.full_round(1, a=ready(1))

    together, alone = ({merge.session: merge.share for merge in commit.merges} for commit in commits(syncer))
    assert together == pytest.approx({"a": 1 / 6, "b": 4 / 6, "c": 1 / 6})
    assert alone == pytest.approx({"a": 1 / 6})
    assert [commit.work for commit in commits(syncer)] == pytest.approx([1.0, 1 / 6])  # H = 4 steps each


def test_the_share_of_a_lost_learner_goes_to_the_others(syncer: Syncer) -> None:
    syncer.full_round(0, a=ready())
    syncer.now_s += 30.0
    syncer.beat("a", step=40)
    syncer.tick()
    assert syncer.state.roster["b"].is_lapsed
    syncer.full_round(0, a=ready(seq=2, start=100, stop=200, base=1))

    assert [merge.share for commit in commits(syncer) for merge in commit.merges] == [0.5, 1.0]


def test_a_learner_that_evaluates_keeps_its_share(syncer: Syncer) -> None:
    syncer.beat("b", phase="evaluating")
    syncer.full_round(0, a=ready())

    assert [merge.share for merge in commits(syncer)[0].merges] == [0.5]


def test_work_counts_only_the_part_that_the_norm_guard_kept(syncer: Syncer) -> None:
    syncer.intent("a")
    for session in "ab":
        syncer.contribute(session, ready())
    syncer.handle(on.Merged(0, syncer.round().number, {"b": 0.25}))
    syncer.committed()

    (commit,) = commits(syncer)
    assert commit.work == pytest.approx(0.5 * 1 + 0.5 * 0.25)
    assert [(merge.kept, merge.stop) for merge in commit.merges] == [(1.0, 100), (0.25, 25)]
    books = {member.learner: syncer.state.account(member) for member in syncer.state.roster.live()}
    assert (books["a"].merged[0].size, books["b"].merged[0].size) == (100, 25)
    assert syncer.restarted().state.roster["b"].fates[0] == (1, "merged", 1, None, 0.25)


def test_a_full_disk_suspends_the_round_until_the_commit_is_written(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.contribute("b", ready())
    syncer.merge()
    syncer.handle(on.CommitFailed(0, 1, "no space left"))
    assert (syncer.round().stage, syncer.state.rounds.suspended) == ("suspended", "no space left")
    assert syncer.version() == 0

    assert members(syncer.tick(2.5)) == ["a", "b"]
    syncer.commit()
    assert (syncer.version(), syncer.state.rounds.suspended) == (1, None)


def test_a_stage_is_followed_only_by_stages_of_the_table() -> None:
    round_ = Round(1, 0.0, 0.0, 1.0, set(), 1)
    with pytest.raises(AssertionError, match="from collecting to committing"):
        round_.go("committing")

    assert set(NEXT) == {stage for following in NEXT.values() for stage in following} | {"collecting"}
