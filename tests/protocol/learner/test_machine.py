"""The learner's machine, event by event. Two fragments, H = 4, tau = 1: fragment 0 is due at step 2, 1 at step 4."""

from __future__ import annotations

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import events as on
from lightning_diloco.protocol import messages as msg
from tests.protocol.harness import Learner, of_kind


@pytest.fixture
def learner() -> Learner:
    return Learner()


# ------------------------------------------------------------------------------------------------- asking for rounds


def test_an_intent_is_sent_one_step_ahead_and_at_every_step_until_the_announcement(learner: Learner) -> None:
    learner.step(2)
    assert learner.says == []  # due at 2 and 4, but fewer than H - tau steps have passed
    learner.step()
    assert learner.says == [msg.Intent(1, 0.0)]
    learner.step()
    assert learner.says == [msg.Intent(1, 0.0)]

    learner.hear(msg.Announce(1, 1))
    learner.step()
    assert msg.Intent(1, 0.0) not in learner.says


def test_intents_of_fast_steps_do_not_flood_the_syncer(learner: Learner) -> None:
    learner.step(3)
    said = [len(learner.says)]
    for _ in range(50):
        learner.handle(on.StepDone(learner.state.step + 1, learner.state.tokens + 10), 0.001)
        said.append(sum(message == msg.Intent(1, 0.0) for message in learner.says))
    assert sum(said) == 1
    learner.step()
    assert msg.Intent(1, 0.0) in learner.says, "it may have been lost"


def test_an_intent_has_the_step_times(learner: Learner) -> None:
    learner.state.step_s, learner.state.long_step_s = 0.5, 2.0
    learner.step(3)

    assert learner.says == [msg.Intent(1, 0.5, long_step_s=2.0)]


def test_a_fragment_snapshotted_for_others_is_not_due_again_at_once(learner: Learner) -> None:
    learner.step(2)
    ready = learner.snapshot(1)
    learner.commit(1, 1, seq=ready.seq)
    learner.land(1, 1, ready.seq)  # step 4, its own slot

    assert msg.Intent(1, 0.0) not in learner.says


def test_an_announced_round_is_answered_at_the_next_boundary(learner: Learner) -> None:
    learner.step()
    assert learner.hear(msg.Announce(0, 1)) == []
    learner.step()

    ready = msg.Ready(fragment=0, seq=1, base=0, generation=0, start=0, stop=20, steps=2)
    assert learner.actions[:2] == [do.Snapshot(ready), do.Say(ready)]


def test_without_a_step_a_round_is_declined(learner: Learner) -> None:
    learner.hear(msg.Announce(0, 1))
    learner.handle(on.Pause())

    assert learner.says == [msg.Decline(0, 1)]


def test_a_repeated_announcement_gets_the_same_answer_and_no_second_snapshot(learner: Learner) -> None:
    ready = learner.snapshot()
    learner.hear(msg.Announce(0, 1))
    assert ready in learner.says
    learner.commit(0, 1, seq=1)
    learner.land(0, 1, 1)

    learner.hear(msg.Announce(0, 1))
    assert learner.says == [msg.Decline(0, 1)]
    assert of_kind(learner.step(), do.Snapshot) == []


def test_an_outstanding_contribution_answers_the_next_round_instead_of_a_snapshot(learner: Learner) -> None:
    ready = learner.snapshot()
    learner.hear(msg.Announce(0, 2))

    assert learner.says == [ready]
    assert of_kind(learner.step(), do.Snapshot) == []


def test_a_round_is_answered_after_the_pending_merge_has_landed(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 1, seq=1)
    learner.hear(msg.Announce(0, 2))
    assert of_kind(learner.step(), do.Snapshot) == []

    (snapshot,) = of_kind(learner.land(0, 1, 1), do.Snapshot)
    assert (snapshot.ready.base, snapshot.ready.start) == (1, 10)


# ------------------------------------------------------------------------------------------------------------- fates


def test_a_merge_changes_nothing_until_it_has_landed(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 1, seq=1)
    assert learner.state.progress.pending[0] == ((0, 10),)

    landed = learner.land(0, 1, seq=1)
    assert of_kind(landed, do.Land) == [do.Land(0)]
    assert of_kind(landed, do.Forget) == [do.Forget(0, 1)]
    assert learner.state.progress.pending[0] == ((10, 20),)


def test_the_part_cut_off_by_the_guard_goes_into_the_next_contribution(learner: Learner) -> None:
    first = learner.snapshot()
    learner.commit(0, 1, seq=1)
    learner.handle(on.Staged(0, 0, 1, 1, kept=0.25))
    learner.step(3)
    second = learner.snapshot(0, 2)

    assert (first.start, first.stop, second.start, second.stop) == (0, 10, 2, 50)
    assert second.steps == 5
    seen, booked = learner.books()
    assert seen == booked


def test_the_part_cut_off_by_the_guard_is_booked_if_landings_drop_progress() -> None:
    learner = Learner(align="overwrite")
    learner.snapshot()
    learner.commit(0, 1, seq=1)
    learner.handle(on.Staged(0, 0, 1, 1, kept=0.25))
    learner.step()

    assert learner.state.progress.discarded == {"overwritten": 8 + 10}
    seen, booked = learner.books()
    assert seen == booked


@pytest.mark.parametrize("fate", ["superseded", "refused"])
def test_bytes_of_a_contribution_that_was_decided_while_it_was_encoded_are_forgotten(
    learner: Learner, fate: msg.Fate
) -> None:
    learner.hear(msg.Announce(0, 1))
    (snapshot,) = of_kind(learner.step(), do.Snapshot)
    learner.hear(msg.FateIs(0, snapshot.ready.seq, fate))
    assert learner.handle(on.Encoded(0, snapshot.ready.seq)) == [do.Forget(0, snapshot.ready.seq)]


def test_the_merge_of_others_leaves_the_contribution_outstanding(learner: Learner) -> None:
    learner.snapshot()
    learner.handle(on.Uploaded(0, 1))
    learner.commit(0, 1)
    assert msg.AskFate(0, 1) in learner.says

    learner.land(0, 1)
    assert learner.state.progress.pending[0] == ((0, 10), (10, 20))


def test_a_fate_is_not_requested_during_the_upload(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 1)
    assert learner.says == []
    learner.handle(on.Tick(), after_s=60.0)
    assert msg.AskFate(0, 1) not in learner.says

    learner.handle(on.UploadFailed(0, 1))
    assert learner.says == [msg.AskFate(0, 1)]


def test_an_unknown_contribution_is_uploaded_again_unless_its_upload_runs(learner: Learner) -> None:
    ready = learner.snapshot()
    assert learner.hear(msg.FateIs(0, 1, "unknown")) == []

    learner.handle(on.UploadFailed(0, 1))
    assert learner.hear(msg.FateIs(0, 1, "unknown")) == [do.Upload(ready)]


def test_a_request_is_repeated_after_a_lost_answer(learner: Learner) -> None:
    learner.snapshot()
    learner.handle(on.Uploaded(0, 1))

    num_questions = 0
    for _ in range(14):
        learner.handle(on.Tick(), after_s=0.5)
        num_questions += learner.says.count(msg.AskFate(0, 1))
    assert num_questions == 3  # at once, and every three seconds

    learner.hear(msg.FateIs(0, 1, "held"))
    learner.handle(on.Tick(), after_s=5.0)
    assert learner.says.count(msg.AskFate(0, 1)) == 0
    learner.handle(on.Tick(), after_s=25.0)
    assert learner.says.count(msg.AskFate(0, 1)) == 1


def test_a_superseded_range_is_fresh_again_with_carry(learner: Learner) -> None:
    learner.snapshot()
    learner.step(2)
    learner.hear(msg.FateIs(0, 1, "superseded"))

    assert learner.state.progress.pending[0] == ((0, 30),)
    assert learner.state.discarded == {}
    assert (learner.snapshot(0, 2).start, learner.snapshot(1, 3).seq) == (0, 1)


def test_a_round_that_was_answered_with_a_superseded_contribution_is_answered_again(learner: Learner) -> None:
    """Ranks postpone fates. Before, a slow learner answered with the old contribution and was never merged."""
    ready = learner.snapshot()
    learner.hear(msg.Announce(0, 2))
    assert ready in learner.says
    learner.hear(msg.FateIs(0, 1, "superseded"))

    (snapshot,) = of_kind(learner.step(), do.Snapshot)
    assert (snapshot.ready.seq, snapshot.ready.start) == (2, 0)


def test_a_superseded_range_is_booked_with_overwrite() -> None:
    learner = Learner(align="overwrite")
    learner.snapshot()
    learner.hear(msg.FateIs(0, 1, "superseded"))

    assert learner.state.discarded == {"superseded": 10}
    assert learner.books() == (20, 20)


def test_a_landing_that_overwrites_books_the_steps_in_flight() -> None:
    learner = Learner(align="overwrite")
    learner.snapshot()
    learner.step(2)
    learner.commit(0, 1, seq=1)
    learner.land(0, 1, 1)

    # The snapshot had 10 tokens. 20 more are in flight, and the step before the boundary of the landing adds 10.
    assert learner.state.discarded == {"overwritten": 30}
    assert learner.books() == (80, 80)


def test_a_refusal_after_an_overwriting_landing_books_every_token_once() -> None:
    learner = Learner(align="overwrite")
    learner.snapshot()
    learner.step(2)
    learner.commit(0, 1)
    learner.land(0, 1)
    learner.hear(msg.FateIs(0, 1, "refused", reason="norm"))
    learner.land(0, 1, is_full=True)

    assert learner.state.discarded == {"overwritten": 30, "refused": 20}
    assert learner.books() == (100, 100)


def test_a_refusal_drops_this_fragment_only_and_adopts_its_anchor(learner: Learner) -> None:
    learner.snapshot()
    learner.step()
    learner.hear(msg.FateIs(0, 1, "refused", reason="not finite"))
    (fetch,) = of_kind(learner.actions, do.Fetch)
    assert (fetch.fragment, fetch.adopt) == (0, True)

    learner.land(0, 0, is_full=True)
    assert learner.state.discarded == {"refused": 30}
    assert learner.state.progress.pending == ((), ((0, 30),))


def test_an_update_fetched_to_be_added_is_not_adopted(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 5)  # starts a fetch
    learner.hear(msg.FateIs(0, 1, "refused"))

    assert of_kind(learner.land(0, 5, is_full=True), do.Land) == []
    (fetch,) = of_kind(learner.handle(on.Tick()), do.Fetch)
    assert fetch.adopt
    assert of_kind(learner.land(0, 5, is_full=True), do.Land) == [do.Land(0)]


def test_three_refusals_in_a_row_stop_the_learner(learner: Learner) -> None:
    for round_ in (1, 2, 3):
        ready = learner.snapshot(0, round_)
        learner.hear(msg.FateIs(0, ready.seq, "refused", reason="not finite"))
        failures = of_kind(learner.actions, do.Fail)
        assert [f.error for f in failures] == (["RefusedError"] if round_ == 3 else [])
        if round_ < 3:
            learner.land(0, 0, is_full=True)
    assert "not finite" in failures[0].text


def test_a_merge_between_refusals_starts_the_count_anew(learner: Learner) -> None:
    for round_, fate in enumerate(("refused", "refused", "merged", "refused"), 1):
        ready = learner.snapshot(0, round_)
        if fate == "merged":
            learner.commit(0, 1, seq=ready.seq)
            learner.land(0, 1, ready.seq)
        else:
            learner.hear(msg.FateIs(0, ready.seq, "refused"))
            assert of_kind(learner.actions, do.Fail) == []
            learner.land(0, learner.state.fragments[0].landed, is_full=True)


# ----------------------------------------------------------------------------------------------------------- landing


def test_nothing_lands_while_its_delta_is_being_encoded(learner: Learner) -> None:
    learner.commit(0, 1)
    learner.hear(msg.Announce(0, 2))
    learner.step()  # snapshot, not encoded yet
    assert of_kind(learner.land(0, 1), do.Land) == []

    learner.handle(on.Encoded(0, 1))
    assert of_kind(learner.step(), do.Land) == [do.Land(0)]


def test_an_update_that_leaves_out_the_own_merge_does_not_land(learner: Learner) -> None:
    learner.snapshot()
    learner.commit(0, 1, seq=1)

    assert of_kind(learner.land(0, 1, seq=None), do.Land) == []


def test_one_fetch_at_a_time_and_a_failed_one_is_repeated(learner: Learner) -> None:
    assert of_kind(learner.commit(0, 1), do.Fetch) == [do.Fetch(0, 0, 0, None, False)]
    assert of_kind(learner.commit(0, 2), do.Fetch) == []

    learner.handle(on.FetchFailed(0))
    assert of_kind(learner.handle(on.Tick()), do.Fetch) == [do.Fetch(0, 0, 0, None, False)]


def test_a_learner_that_evaluates_declines_rounds_and_reports_its_phase(learner: Learner) -> None:
    learner.step()
    learner.hear(msg.Announce(0, 1))
    learner.handle(on.Evaluating(True))
    assert learner.says[0] == msg.Decline(0, 1)
    assert learner.says[-1].phase == "evaluating"

    learner.hear(msg.Announce(1, 2))
    assert learner.says == [msg.Decline(1, 2)]
