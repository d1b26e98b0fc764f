"""Memory for joining processes is bounded, and real learners can join during a flood."""

from __future__ import annotations

import pytest

from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.syncer import admission, joins, records
from tests.protocol.harness import Syncer, manifest, of_kind, said

FEW = 4


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "MAX_JOINING", FEW)
    monkeypatch.setattr(admission, "MAX_CONTENDERS", FEW)


def joining(syncer: Syncer) -> list[str]:
    return [member.session for member in syncer.state.roster.in_state("joining", "confirmed")]


@pytest.mark.parametrize("taking_part", [(), ("a", "b")], ids=["before the seed", "after it"])
def test_a_flood_of_hellos_takes_bounded_memory(taking_part: tuple[str, ...]) -> None:
    syncer = Syncer(*taking_part)
    for number in range(100):
        syncer.hello(f"flood-{number}")
        syncer.now_s += 0.5
    assert len(joining(syncer)) == FEW
    assert len(syncer.state.roster.members) == FEW + len(taking_part)


def test_a_repeated_hello_gets_the_place_of_the_process_that_was_silent_for_longest() -> None:
    syncer = Syncer("a")
    for number in range(FEW):
        syncer.hello(f"flood-{number}")
        syncer.now_s += 1.0
    assert syncer.hello("honest") == []  # no process has been silent for a lease

    syncer.now_s += syncer.config.lease_s - FEW + 1.0
    assert said(syncer.hello("honest"), "honest", msg.Welcome)
    assert joining(syncer) == ["flood-1", "flood-2", "flood-3", "honest"]
    assert of_kind(syncer.log, records.Forgotten) == [records.Forgotten("flood-0")]
    assert joining(syncer.restarted()) == joining(syncer)


def test_a_seeder_that_is_forgotten_loses_its_lease() -> None:
    syncer = Syncer()
    syncer.hello("silent")
    for number in range(FEW - 1):
        syncer.hello(f"waiting-{number}")
    syncer.now_s += 1.5 * syncer.config.lease_s
    for number in range(FEW - 1):
        syncer.hello(f"waiting-{number}")

    (grant,) = said(syncer.hello("newcomer"), "newcomer", msg.SeedGrant)
    assert grant.lease == 2
    assert "silent" not in joining(syncer)
    syncer.tell("newcomer", msg.SeedPlan(2, manifest(syncer.config)))
    assert of_kind(syncer.log, records.Seeding) == [records.Seeding(2)]


def test_a_flood_under_a_name_in_use_takes_bounded_memory() -> None:
    syncer = Syncer("a")
    for number in range(100):
        syncer.hello(f"flood-{number}", "a")
    assert len(syncer.state._contenders._since_s) <= FEW
    assert of_kind(syncer.log, records.Granted) == [records.Granted("a", "a", 1, 0)]
