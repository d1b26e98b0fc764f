"""One of four learners sends false contributions and claims; the other three train. Service, links and devices are
real.

`tests/bench/broken_learner.py` measures the effect of a broken learner on the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_diloco.syncer.replay import replay
from tests.attacks import contributions
from tests.attacks.contributions import ATTACKS, Contributor
from tests.learner.fleet import Fleet, assert_exact


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, record_contributions=True) as fleet:
        for name in "abc":
            fleet.learner(name).go()
        fleet.until_commits(9)
        yield fleet


def mad(fleet: Fleet) -> Contributor:
    peer = Contributor(fleet.transport.connect())
    peer.join()
    return peer


def of_mad(fleet: Fleet) -> dict[str, object]:
    return next(learner for learner in fleet.status()["learners"] if learner["id"] == "mad")


def told(fleet: Fleet) -> list[str]:
    # On a busy machine, the syncer may be suspended, and honest learners may lapse.
    comes_and_goes = ("seeded", "join", "leave", "lapse", "return", "stood still")
    recent = [event for event in fleet.status()["recent"] if event["event"] not in comes_and_goes]
    assert all(event["learner"] == "mad" for event in recent), "nobody else is blamed"
    return [event["event"] for event in recent]


def assert_unharmed(fleet: Fleet, *, num_merged: int | None = 0) -> None:
    """Check that honest learners finish and that the run can be replayed."""
    fleet.until_commits(6)
    assert fleet.service.state.rounds.generation == 0
    largest = max(float(values.abs().max()) for values in fleet.published())
    for learner in fleet.learners:
        learner.enough().done()
    accounts = fleet.service.state.ledger.accounts
    if num_merged is not None:
        assert accounts["mad", 1].num_merged == num_merged
    summary = fleet.stop()
    assert_exact(summary)
    assert largest < 10.0, "of targets around 1"
    assert replay(fleet.run_dir).level == "merges"


@pytest.mark.seconds
@pytest.mark.parametrize(
    "attack",
    [
        "random_directions",
        pytest.param("huge_values", marks=pytest.mark.slow),
        pytest.param("many_steps", marks=pytest.mark.slow),
    ],
)
def test_contributions_that_are_too_long_are_refused_with_a_reason_and_lead_to_quarantine(
    fleet: Fleet, attack: str
) -> None:
    ATTACKS[attack](mad(fleet))

    assert told(fleet) == ["refused", "refused", "quarantine"]
    assert "norm" in str(of_mad(fleet)["quarantined"])
    assert of_mad(fleet)["num_refused"] == 12
    assert ["mad"] in [wait["for"] for wait in fleet.status()["waits"]]
    assert_unharmed(fleet)


@pytest.mark.slow
def test_contributions_of_zeros_lead_to_quarantine(fleet: Fleet) -> None:
    contributions.zeros(mad(fleet))

    assert told(fleet) == ["quarantine"]
    assert_unharmed(fleet, num_merged=None)


@pytest.mark.slow
def test_an_impossible_token_counter_is_ignored(fleet: Fleet) -> None:
    contributions.many_tokens(mad(fleet))

    assert set(told(fleet)) <= {"rejected", "refused"}
    assert fleet.status()["ledger"]["seen"] < contributions.CLAIMED
    assert_unharmed(fleet)


@pytest.mark.seconds
def test_claims_without_a_proof_do_not_begin_a_generation(fleet: Fleet) -> None:
    contributions.generation_claims(mad(fleet))

    assert_unharmed(fleet)
    assert fleet.summary is not None
    assert "restored" not in fleet.summary["tokens_discarded"]


@pytest.mark.seconds
def test_rounds_do_not_wait_for_a_learner_that_claims_long_steps(fleet: Fleet) -> None:
    wanted = fleet.num_commits + 15
    contributions.long_steps(mad(fleet), lambda: fleet.num_commits >= wanted)

    assert fleet.num_commits >= wanted, "while it says so"
    assert_unharmed(fleet)
