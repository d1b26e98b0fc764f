"""Contributions at the syncer: acceptance, the single fate of each, age, and fencing."""

from __future__ import annotations

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import messages as msg
from lightning_diloco.simulate.invariants import durable
from tests.protocol.harness import Syncer, members, of_kind, ready, said


@pytest.fixture
def syncer() -> Syncer:
    return Syncer("a", "b")


# ------------------------------------------------------------------------------------------------------ contributions


def test_a_committed_contribution_is_named_and_merged_once(syncer: Syncer) -> None:
    actions = syncer.full_round(0, a=ready(), b=ready(stop=80))

    (commit,) = said(actions, "a", msg.Commit)
    assert commit.contributors == (msg.Contributor("a", 1, 1), msg.Contributor("b", 1, 1))
    assert said(syncer.payload("a", ready()), "a") == [msg.FateIs(0, 1, "merged", 1)]
    syncer.intent("a")
    assert syncer.state.rounds.fragments[0].held == {}


def test_a_range_that_was_merged_is_refused_under_a_new_number(syncer: Syncer) -> None:
    syncer.full_round(0, a=ready(), b=ready())

    (fate,) = said(syncer.payload("a", ready(seq=2, start=90, stop=150, base=1)), "a", msg.FateIs)
    assert (fate.fate, fate.reason) == ("refused", "10 tokens of [90, 150) were merged before")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": 0}, "both must be positive"),
        ({"stop": 0}, "both must be positive"),
        ({"base": -1}, "the newest is 0"),
    ],
)
def test_an_impossible_description_is_refused(syncer: Syncer, change: dict[str, int], reason: str) -> None:
    (fate,) = said(syncer.payload("a", ready(**change)), "a", msg.FateIs)

    assert fate.fate == "refused"
    assert reason in (fate.reason or "")


def test_a_refusal_is_recorded_before_it_is_sent_and_is_repeated(syncer: Syncer) -> None:
    actions = syncer.payload("a", ready(), error="scales are not finite")
    kinds = [type(action) for action in actions]
    assert kinds.index(do.Record) < kinds.index(do.Send)

    (fate,) = said(syncer.tell("a", msg.AskFate(0, 1)), "a")
    assert (fate.fate, fate.reason) == ("refused", "scales are not finite")


def test_a_second_contribution_while_one_is_undecided_is_refused(syncer: Syncer) -> None:
    syncer.tell("a", ready())

    (fate,) = said(syncer.tell("a", ready(seq=2, start=100, stop=120)), "a", msg.FateIs)
    assert "seq 1 is undecided" in (fate.reason or "")


def test_an_unknown_contribution_is_requested(syncer: Syncer) -> None:
    assert said(syncer.tell("a", msg.AskFate(0, 1)), "a") == [msg.FateIs(0, 1, "unknown")]
    syncer.tell("a", ready())
    assert said(syncer.tell("a", msg.AskFate(0, 1)), "a") == [msg.FateIs(0, 1, "unknown")]


# ---------------------------------------------------------------------------------------------------- late, superseded


def age(syncer: Syncer, versions: int) -> None:
    """Commit this number of versions with a's contributions only."""
    for _ in range(versions):
        seq = syncer.version() + 1
        syncer.intent("a")
        syncer.contribute("a", ready(seq=seq, start=10 * seq, stop=10 * seq + 10, base=syncer.version()))
        if syncer.round().stage == "collecting":
            syncer.tell("b", msg.Decline(0, syncer.round().number))
        if syncer.round().stage == "transferring":
            syncer.tick(3.0)
        syncer.beat("b", step=seq)
        syncer.commit()


def test_a_contribution_that_is_too_old_is_superseded_and_its_learner_is_informed(syncer: Syncer) -> None:
    syncer.tell("b", ready())
    age(syncer, 4)
    assert "b" in syncer.state.rounds.fragments[0].held

    age(syncer, 1)
    actions = syncer.intent("a")
    (fate,) = said(actions, "b", msg.FateIs)
    assert (fate.fate, fate.seq) == ("superseded", 1)


def test_a_round_waits_once_for_a_learner_that_was_superseded_twice() -> None:
    syncer = Syncer("a", "b", grace=0.0)
    syncer.state.roster["b"].num_superseded[0] = 2
    syncer.intent("a")
    syncer.contribute("a", ready())
    for _ in range(9):
        assert of_kind(syncer.tick(1.0), do.Merge) == []
        syncer.beat("b", step=int(syncer.now_s))
    assert members(syncer.tick(1.1)) == ["a"]
    syncer.commit()

    syncer.intent("a")
    syncer.contribute("a", ready(seq=2, start=100, stop=120, base=1))
    assert members(syncer.tick(1.1)) == ["a"]


def test_a_round_that_a_superseded_learner_declines_does_not_count_as_waiting_for_it() -> None:
    syncer = Syncer("a", "b", grace=0.0)
    syncer.state.roster["b"].num_superseded[0] = 2
    syncer.intent("a")
    syncer.tell("b", msg.Decline(0, 1))
    assert members(syncer.contribute("a", ready())) == ["a"]
    syncer.commit()

    syncer.intent("a")
    syncer.contribute("a", ready(seq=2, start=100, stop=120, base=1))
    for _ in range(9):
        assert of_kind(syncer.tick(1.0), do.Merge) == []
        syncer.beat("b", step=int(syncer.now_s))
    assert members(syncer.tick(1.1)) == ["a"]


def test_a_round_waits_for_the_payload_of_a_learner_that_was_superseded_twice() -> None:
    syncer = Syncer("a", "b", grace=0.0)
    syncer.state.roster["b"].num_superseded[0] = 2
    syncer.intent("a")
    syncer.tell("b", ready())
    syncer.contribute("a", ready())
    actions = []
    for _ in range(20):
        actions += syncer.tick(2.0)
        syncer.beat("b", step=int(syncer.now_s))
    assert of_kind(actions, do.Merge) == []

    assert members(syncer.payload("b", ready())) == ["a", "b"]


def test_a_merge_ends_the_count_of_superseded_contributions(syncer: Syncer) -> None:
    syncer.state.roster["b"].num_superseded[0] = 1
    syncer.full_round(0, a=ready(), b=ready())

    assert syncer.state.roster["b"].num_superseded[0] == 0


# ------------------------------------------------------------------------------------------------------------- fences


def test_a_merge_leaves_out_a_contributor_that_is_fenced_off_meanwhile(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.contribute("b", ready())
    replace(syncer, "b")

    assert members(syncer.merge()) == ["a"]
    (commit,) = said(syncer.commit(), "a", msg.Commit)
    assert [c.learner for c in commit.contributors] == ["a"]


def test_a_fence_waits_for_a_commit_that_names_the_old_process(syncer: Syncer) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.contribute("b", ready())
    syncer.merge()  # the commit is being written
    actions = replace(syncer, "b")
    assert said(actions, "b2", msg.Active) == []

    syncer.committed()
    assert said(syncer.tick(), "b2", msg.Active) != []
    account = syncer.state.ledger.account("b", 1)
    assert (account.num_merged, account.is_closed) == (100, True)


def test_messages_and_payloads_of_a_fenced_process_are_ignored(syncer: Syncer) -> None:
    replace(syncer, "b")

    for actions in (syncer.tell("b", ready()), syncer.payload("b", ready()), syncer.intent("b")):
        (rejected,) = said(actions, "b")
        assert rejected.error == "fenced"
        assert of_kind(actions, do.Merge) == []
    assert syncer.state.rounds.fragments[0].held == {}


def replace(syncer: Syncer, learner: str) -> list[do.SyncerAction]:
    """Start a new process of this learner after the old one fell silent."""
    new = f"{learner}2"
    syncer.hello(new, learner)
    syncer.now_s += 3.5
    syncer.beat("a")
    return syncer.join(new, learner, incarnation=2)


@pytest.mark.parametrize("how", ["ready", "payload", "damaged"])
def test_messages_about_a_contribution_that_is_being_written_change_nothing(syncer: Syncer, how: str) -> None:
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.tell("b", msg.Decline(0, 1))
    syncer.merge()
    again = ready(stop=90)
    actions = (
        syncer.tell("a", again) if how == "ready" else syncer.payload("a", again, "odd" if how == "damaged" else None)
    )
    assert of_kind(actions, do.Record) == []

    syncer.committed()
    assert said(syncer.tell("a", msg.AskFate(0, 1)), "a") == [msg.FateIs(0, 1, "merged", 1)]
    assert durable(syncer.restarted().state) == durable(syncer.state)
