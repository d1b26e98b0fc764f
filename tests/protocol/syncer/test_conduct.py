"""Quarantine: its causes, its effects, and its end."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.events import Verdict
from lightning_diloco.protocol.syncer.conduct import NUM_LIKENESSES, RELEASE_AFTER, STRIKES
from tests.protocol.harness import Syncer, members, of_kind, ready, said

ODD, REFUSED = Verdict("nothing is in it"), Verdict("far too long", is_refused=True)
SOUND = Verdict(None, likeness=0.5, is_telling=True)


class Rounds(Syncer):
    """Rounds of fragment 0 to which a, b, c and mad contribute."""

    def __init__(self, **config: Any) -> None:
        super().__init__("a", "b", "c", "mad", **config)
        self.seq = 0

    def next(self, verdict: Verdict, *, without: str = "") -> list[do.SyncerAction]:
        """Run a round with this verdict on mad's contribution; return the resulting actions."""
        self.seq += 1
        there = [session for session in ("a", "b", "c", "mad") if session not in without.split()]
        self.now_s += 1.0
        for session in there:
            self.beat(session, step=4 * self.seq, tokens=100 * self.seq)
        self.intent(there[0])
        about = {"seq": self.seq, "start": 100 * (self.seq - 1), "stop": 100 * self.seq, "base": self.version()}
        todo = [a for session in ("mad", *there) if session in there for a in self.contribute(session, ready(**about))]
        if self.round() is None:
            return todo
        if self.round().stage == "collecting":
            todo += self.tick(4.0)
        verdicts = {session: SOUND for session in there if session != "mad"}
        todo += self.merge(mad=verdict) if verdict.is_refused else self.merge(**verdicts, mad=verdict)
        if self.round() is not None and self.round().stage == "merging":
            todo += self.merge(**verdicts)
        if self.applying:
            todo += self.committed()
        return todo

    @property
    def is_out(self) -> bool:
        return "mad" in self.state.roster.quarantined


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


def fates(actions: list[do.SyncerAction]) -> list[str]:
    return [fate.fate for fate in said(actions, "mad", msg.FateIs)]


def notes(actions: list[do.SyncerAction]) -> list[str]:
    return [note.event for note in of_kind(actions, do.Note)]


def contributors(actions: list[do.SyncerAction]) -> list[str]:
    (commit,) = said(actions, "a", msg.Commit)
    return [c.learner for c in commit.contributors]


def test_a_refused_contribution_is_left_out_with_a_reason_and_the_round_continues(rounds: Rounds) -> None:
    actions = rounds.next(REFUSED)

    assert fates(actions) == ["refused"]
    assert said(actions, "mad", msg.FateIs)[0].reason == "far too long"
    assert contributors(actions) == ["a", "b", "c"]
    assert rounds.state.roster["mad"].num_refused == 1


@pytest.mark.parametrize("verdict", [ODD, REFUSED], ids=["odd", "refused"])
def test_odd_contributions_in_a_row_lead_to_quarantine(rounds: Rounds, verdict: Verdict) -> None:
    for _ in range(STRIKES - 1):
        assert "quarantine" not in notes(rounds.next(verdict))
    rounds.next(SOUND)
    for _ in range(STRIKES - 1):
        assert "quarantine" not in notes(rounds.next(verdict))
    assert not rounds.is_out
    actions = rounds.next(verdict)

    assert notes(actions)[0] == "quarantine"
    assert fates(actions) == ["quarantined"]
    assert contributors(actions) == ["a", "b", "c"]
    assert verdict.odd is not None
    assert verdict.odd in rounds.state.roster.quarantined["mad"]


def test_rounds_neither_wait_for_a_learner_in_quarantine_nor_count_it(rounds: Rounds) -> None:
    for _ in range(STRIKES):
        rounds.next(ODD)
    actions = rounds.next(SOUND)

    (merge,) = of_kind(actions, do.Merge)
    assert [c.session for c in merge.on_trial] == ["mad"]
    assert merge.shares == pytest.approx((1 / 3,) * 3)
    assert fates(actions) == ["quarantined"]

    rounds.intent("a")
    about = {"seq": 50, "start": 900, "stop": 950, "base": rounds.version()}
    actions = [a for session in "abc" for a in rounds.contribute(session, ready(**about))]
    assert members(actions) == ["a", "b", "c"], "mad has not answered"


def test_sound_contributions_end_the_quarantine(rounds: Rounds) -> None:
    for _ in range(STRIKES):
        rounds.next(ODD)
    found = [notes(rounds.next(SOUND)) for _ in range(NUM_LIKENESSES + RELEASE_AFTER - 1)]

    assert ["release" in each for each in found].index(True) == len(found) - 1
    assert not rounds.is_out
    assert contributors(rounds.next(SOUND)) == ["a", "b", "c", "mad"]


@pytest.mark.parametrize("likeness", [-0.4, 0.01], ids=["away from the others", "nowhere"])
def test_contributions_in_another_direction_lead_to_quarantine(rounds: Rounds, likeness: float) -> None:
    for _ in range(NUM_LIKENESSES + STRIKES - 2):
        rounds.next(Verdict(None, likeness=likeness, is_telling=True))
    assert not rounds.is_out
    rounds.next(Verdict(None, likeness=likeness, is_telling=True))

    assert rounds.is_out
    for _ in range(2 * NUM_LIKENESSES):
        rounds.next(Verdict(None, likeness=likeness, is_telling=True))
    assert rounds.is_out, "it has not changed"


def test_directions_are_ignored_with_the_norm_guard() -> None:
    rounds = Rounds(guard="norm")
    for _ in range(2 * NUM_LIKENESSES):
        rounds.next(Verdict(None, likeness=-0.9, is_telling=True))
    assert not rounds.is_out


def test_no_contribution_is_odd_if_no_two_learners_agree(rounds: Rounds) -> None:
    for _ in range(3 * NUM_LIKENESSES):
        verdict = Verdict(None, likeness=0.01, is_telling=True)
        for session in ("a", "b", "mad"):
            assert rounds.state.rounds.conduct.hear(rounds.state.roster[session], verdict) is None


def test_a_learner_alone_in_quarantine_gets_a_refusal_instead_of_waiting(rounds: Rounds) -> None:
    for _ in range(STRIKES):
        rounds.next(ODD)
    rounds.tick(rounds.config.lease_s + 1)  # the others fall silent
    version = rounds.version()
    rounds.beat("mad", step=100, tokens=1000)
    about = {"seq": 50, "start": 900, "stop": 950, "base": version}
    rounds.contribute("mad", ready(**about))
    actions = rounds.intent("mad")

    assert fates(actions) == ["quarantined"]
    assert rounds.version() == version


def test_quarantine_survives_restarts_of_syncer_and_learner(rounds: Rounds) -> None:
    for _ in range(STRIKES):
        rounds.next(ODD)
    again = rounds.restarted()
    again.tick(60.0)
    again.join("mad2", "mad", incarnation=2)

    assert again.state.roster.is_quarantined("mad2")


def test_a_round_waits_once_for_a_payload_that_missed_its_round() -> None:
    syncer = Syncer("a", "b")
    syncer.intent("a")
    syncer.contribute("a", ready())
    syncer.tell("b", ready())
    syncer.tick(3.0)
    syncer.commit()
    syncer.intent("a")
    actions = syncer.contribute("a", ready(seq=2, start=100, stop=200, base=1)) + syncer.tick(2.5)

    assert members(actions) == ["a"]
    syncer.commit()
    syncer.payload("b", ready())
    syncer.intent("a")
    assert members(syncer.contribute("a", ready(seq=3, start=200, stop=300, base=2))) == ["a", "b"]


def test_more_than_half_of_the_learners_stay_out_of_quarantine(rounds: Rounds) -> None:
    conduct, roster = rounds.state.rounds.conduct, rounds.state.roster
    for session in ("a", "b", "c", "mad"):
        found = [conduct.hear(roster[session], ODD) for _ in range(STRIKES)]
        for record in filter(None, found):
            conduct.apply(record)

    assert set(roster.quarantined) == {"a"}, "of four, two would be half of them"


def test_learners_that_have_left_are_not_compared(rounds: Rounds) -> None:
    conduct, roster = rounds.state.rounds.conduct, rounds.state.roster
    for _ in range(NUM_LIKENESSES):
        conduct.hear(roster["c"], Verdict(None, likeness=0.5, is_telling=True))
        conduct.hear(roster["mad"], Verdict(None, likeness=0.5, is_telling=True))
    roster["c"].state = roster["mad"].state = "left"
    for _ in range(NUM_LIKENESSES + STRIKES):
        # The anchor is optimal for both together, so each pulls in its own direction.
        assert conduct.hear(roster["b"], Verdict(None, likeness=-0.5, is_telling=True)) is None
        assert conduct.hear(roster["a"], Verdict(None, likeness=-0.5, is_telling=True)) is None
