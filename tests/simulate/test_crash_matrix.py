"""The syncer is killed between any two of its actions, and between the steps of every commit.

The disk is reliable, so only state in memory may be lost: learners notice only a silence, no generation begins, and the
accounts balance. The last tests make the syncer or its disk unreliable, and the checks must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.simulate import CrashPoints, Fleet, Network, Pace
from lightning_diloco.simulate.syncer import SimulatedSyncer

Patch = pytest.MonkeyPatch
Points = list[tuple[str, int]]


def life(points: Points) -> CrashPoints:
    """Run with every kind of record and these crashes of the syncer; return the reached points."""
    config = RunConfig(sync_every=4, num_fragments=2, overlap=1, quorum=2, max_staleness_versions=1, lease_s=4.0)
    crashes = CrashPoints(points)
    network = Network(latency_s=0.05, upload_s=0.4, download_s=0.4)
    fleet = Fleet(config, network=network, seed=3, crashes=crashes)
    quick = fleet.start("quick", Pace(step_s=0.5, jitter=0.1, tokens=7, num_steps=30))
    slow = fleet.start("slow", Pace(step_s=1.5, jitter=0.1, tokens=5, num_steps=10, upload_factor=12.0))
    zombie = fleet.start("gone", Pace(step_s=1.0, jitter=0.1, tokens=3))
    fleet.run_until(5.0)
    fleet.syncer.disk.take_snapshot(fleet.syncer.state)
    fleet.cut(zombie)
    fleet.run_until(10.5)
    fleet.heal(zombie)
    fleet.run_until(11.5)
    fleet.cut(zombie)
    quick.bad_payload = True
    fleet.run_until(13.0)
    successor = fleet.start("gone", Pace(step_s=1.0, jitter=0.1, tokens=4, num_steps=6))
    fleet.run_until(20.0)
    fleet.heal(zombie)
    fleet.run_to_the_end(limit_s=200.0)
    fleet.run_for(config.lease_s + 1.0)
    check(fleet)
    assert [x.is_last for x in (quick, slow, successor)].count(None) == 0
    assert "was replaced by a newer process" in (zombie.error or "")
    return crashes


def check(fleet: Fleet) -> None:
    """Check the end of a run with a reliable disk."""
    fleet.invariants.audit()
    fleet.syncer.state.finish()
    totals = fleet.syncer.state.ledger.totals()
    assert (totals.is_exact, totals.pending) == (True, 0), totals
    assert fleet.syncer.state.rounds.generation == 0, "learners knew something that the disk did not"
    assert set(totals.discarded) <= {"refused", "lapsed"}, totals
    finished = [m for m in fleet.syncer.state.roster.members.values() if m.state == "left"]
    assert len(finished) == 3


UNDISTURBED = life([]).reached


def test_the_run_itself_reaches_every_kind_of_record_and_action() -> None:
    kinds = {name.partition(" ")[2] for name in UNDISTURBED if name.startswith("Record ")}
    assert kinds == {"Seeding", "Seeded", "Granted", "Activated", "Lapsed", "Returned", "Decided", "Departed"}
    assert {"Merge", "Apply", "append", "tell", "DropPayload", "StoreSeed", "Note", "Send Commit"} <= set(UNDISTURBED)


@pytest.mark.parametrize("name", sorted(UNDISTURBED))
def test_a_syncer_killed_before_the_first_and_the_last_action_of_each_kind_loses_nothing(name: str) -> None:
    for nth in sorted({1, UNDISTURBED[name]}):
        assert life([(name, nth)]).hit == [name]


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_syncer_killed_at_any_boundary_loses_nothing(block: int) -> None:
    for nth in range(1 + block, UNDISTURBED.total() + 1, 10):
        assert len(life([("", nth)]).hit) == 1


@pytest.mark.parametrize("name", ["Record Regenerated", "Note", "Send Welcome", "DropPayload"])
def test_a_syncer_killed_while_it_begins_a_new_generation_begins_it_again(name: str) -> None:
    """Its disk was rolled back, so learners know later versions."""
    fleet = Fleet(RunConfig(sync_every=4, num_fragments=2, overlap=1), network=Network(latency_s=0.05, upload_s=0.4))
    learners = [fleet.start(f"l{i}", Pace(step_s=1.0 + i, tokens=3 + i, num_steps=40)) for i in range(2)]
    fleet.run_until(20.3)
    fleet.syncer.restart(lose=4)
    fleet.syncer.crashes.arm(name, 1)
    fleet.run_to_the_end(limit_s=200.0)
    fleet.run_for(fleet.config.lease_s + 1.0)
    fleet.invariants.audit()
    fleet.syncer.state.finish()
    totals = fleet.syncer.state.ledger.totals()
    assert fleet.syncer.crashes.hit == [name]
    assert [x.is_last for x in learners].count(None) == 0
    assert (totals.is_exact, totals.pending, set(totals.discarded)) == (True, 0, {"restored"})
    assert fleet.syncer.state.rounds.generation == 1


@pytest.mark.slow
@pytest.mark.parametrize("soon", [1, 2, 5, 9])
def test_a_syncer_killed_again_soon_after_its_restart_loses_nothing(soon: int) -> None:
    for nth in range(soon, UNDISTURBED.total() - 20, 6):
        assert len(life([("", nth), ("", soon), ("", soon)]).hit) == 3


# ---------------------------------------------------------------------------------------------- it must be able to fail


def messages_leave_before_their_records(patch: Patch) -> None:
    handle = SyncerState.handle

    def hasty(self: SyncerState, event: Any, now_s: float) -> list[do.SyncerAction]:
        return sorted(handle(self, event, now_s), key=lambda action: not isinstance(action, do.Send))

    patch.setattr(SyncerState, "handle", hasty)


def the_last_record_was_never_synced(patch: Patch) -> None:
    restart = SimulatedSyncer.restart

    def torn(self: SimulatedSyncer, **options: Any) -> None:
        self.disk.lose(1)
        restart(self, **options)

    patch.setattr(SimulatedSyncer, "restart", torn)


@pytest.mark.parametrize("sabotage", [messages_leave_before_their_records, the_last_record_was_never_synced])
def test_crashes_reveal_an_unreliable_syncer(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    life([])  # without a crash it is not detectable

    def matrix() -> None:
        for nth in range(1, UNDISTURBED.total(), 7):
            life([("", nth)])

    with pytest.raises((AssertionError, ValueError, TimeoutError)):
        matrix()
