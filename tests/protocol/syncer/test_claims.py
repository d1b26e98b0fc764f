"""Claims of learners about their tokens, steps and times, and their limits."""

from __future__ import annotations

import pytest

from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.syncer.roster import Member
from lightning_diloco.protocol.syncer.rounds import MAX_SLOWER
from lightning_diloco.protocol.syncer.shares import MAX_RATE, shares_of_work
from tests.protocol.harness import Syncer, members, of_kind, ready, said


def rates(*tokens: int) -> list[Member]:
    return [Member(f"s{k}", f"l{k}", 1, k, step=1, step_s=1.0, tokens=n) for k, n in enumerate(tokens)]


@pytest.mark.parametrize("others", [1, 2, 5])
def test_no_claim_gives_a_learner_the_share_of_the_whole_fleet(others: int) -> None:
    fleet = rates(*[64] * others, 64 * 100)

    assert shares_of_work(fleet, fleet)[-1] == pytest.approx(MAX_RATE / (MAX_RATE + others))


def test_an_impossible_rate_counts_as_the_usual_one() -> None:
    fleet = rates(64, 64, 64, 2**40)

    assert shares_of_work(fleet, fleet) == pytest.approx((0.25,) * 4)


def test_rates_within_bounds_are_not_changed() -> None:
    fleet = rates(64, 64, 64, 128, 32)

    assert shares_of_work(fleet, fleet) == pytest.approx([n / 7.25 for n in (1, 1, 1, 4, 0.25)])


def test_an_impossible_counter_stops_its_learner_and_is_ignored() -> None:
    syncer = Syncer("a", "b", "mad")
    actions = syncer.beat("mad", tokens=2**40) + syncer.beat("mad", tokens=2**40)

    assert [rejected.error for rejected in said(actions, "mad", msg.Rejected)] == ["config"] * 2
    assert [note.event for note in of_kind(actions, do.Note)] == ["rejected"], "told once"
    assert syncer.state.ledger.totals().seen < 2**40
    (fate,) = said(syncer.tell("mad", ready(stop=2**40)), "mad", msg.FateIs)
    assert fate.fate == "refused"
    assert "token_count_fn" in str(fate.reason)


def test_another_batch_size_is_not_a_wrong_counter() -> None:
    syncer = Syncer("a", "b", "large")

    assert said(syncer.beat("large", tokens=100 * 100), "large", msg.Rejected) == []


@pytest.mark.parametrize("quorum", [1, 3])
def test_waits_for_claimed_step_times_are_limited(quorum: int) -> None:
    syncer = Syncer("a", "b", "mad", quorum=quorum)
    syncer.now_s += 0.5
    for session in "ab":
        syncer.intent(session, 1)  # steps of the others take a second
    syncer.tell("mad", msg.Intent(0, 3600.0, 3600.0, 3600.0))
    syncer.contribute("a", ready())
    syncer.contribute("b", ready())
    began_s, merges = syncer.now_s, list[do.Merge]()
    while not merges:
        syncer.beat("mad", step=int(syncer.now_s), tokens=100)
        merges = of_kind(syncer.tick(0.5), do.Merge)

    assert members(merges) == ["a", "b"]
    most_s = 60.0 if quorum == 1 else 60.0 + 10 * MAX_SLOWER
    assert syncer.now_s - began_s <= most_s + 1.0


@pytest.mark.parametrize(("away_s", "steps", "believed"), [(600.0, 600, 600), (600.0, 2**40, 6008), (0.0, 2**40, 8)])
def test_claimed_steps_allow_a_long_contribution_up_to_a_plausible_number(
    away_s: float, steps: int, believed: int
) -> None:
    syncer = Syncer("a", "b", "long")  # H = 4; steps of the others take a second
    syncer.now_s += away_s
    for session in ("a", "b", "long"):
        syncer.beat(session, step=8, tokens=200)
    syncer.intent("a")
    syncer.contribute("long", ready(steps=steps))

    held = syncer.state.rounds.fragments[0].held["long"]
    assert held.contribution.steps == believed
