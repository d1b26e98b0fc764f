"""The real state machines together: participation, late and slow learners, faults, and invariants."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from lightning_diloco.config import RunConfig
from lightning_diloco.simulate import Fleet, Network, Pace, SimulatedLearner
from lightning_diloco.simulate import syncer as syncer_module
from lightning_diloco.simulate.reading import Data

STEADY_S = 50.0


@dataclass(frozen=True)
class Figures:
    """Measurements from `STEADY_S` on; `merged` is the merged share of the new tokens, by learner."""

    participation: float
    rounds_per_period: float
    merged: dict[str, float]


def measure(
    num_learners: int,
    *,
    slowest_s: float = 1.0,
    jitter: float = 0.0,
    last_s: float | None = None,
    upload_s: float = 0.4,
) -> Figures:
    """Measure steps of 1 s to slowest_s, random starts within one period, H = P = 24; the last learner may be slow."""
    fleet = Fleet(RunConfig(), network=Network(latency_s=0.01, upload_s=upload_s, download_s=upload_s))
    start = random.Random(num_learners)
    for i in range(num_learners):
        step_s = 1.0 + (slowest_s - 1.0) * i / (num_learners - 1)
        is_last = i == num_learners - 1
        step_s = last_s if is_last and last_s is not None else step_s
        fleet.start(f"l{i}", Pace(step_s=step_s, jitter=jitter, starts_s=24 * start.random()))
    fleet.run_until(STEADY_S)
    before = _state(fleet)
    fleet.run_for(96.0)
    fleet.invariants.audit()
    counts, steps, merged, seen = (
        {name: value - before[i][name] for name, value in values.items()} for i, values in enumerate(_state(fleet))
    )
    periods = max(steps.values()) / fleet.config.sync_every
    return Figures(
        participation=counts["contributors"] / counts["stepping"],
        rounds_per_period=counts["commits"] / 24 / periods,
        merged={name: merged[name] / 24 / seen[name] for name in merged},
    )


def _state(fleet: Fleet) -> tuple[dict[str, float], ...]:
    counts = fleet.syncer.state.rounds.counts
    accounts = fleet.syncer.state.ledger.accounts
    return (
        {"commits": counts.num_commits, "contributors": counts.num_contributors, "stepping": counts.num_stepping},
        {x.name: x.state.step for x in fleet.learners.values() if x.state},
        {name: account.num_merged for (name, _), account in accounts.items()},
        {name: account.seen for (name, _), account in accounts.items()},
    )


# ------------------------------------------------------------------------------------------------------- participation


@pytest.mark.seconds
@pytest.mark.parametrize("num_learners", [2, 4, 8])
def test_all_learners_take_part_in_every_round_with_random_starts(num_learners: int) -> None:
    figures = measure(num_learners)

    assert figures.participation >= 0.99, figures
    assert 0.95 <= figures.rounds_per_period <= 1.05, figures


@pytest.mark.seconds
@pytest.mark.parametrize("num_learners", [2, 4, 8])
def test_participation_holds_with_unequal_speeds_and_jitter(num_learners: int) -> None:
    figures = measure(num_learners, slowest_s=1.18, jitter=0.1)

    assert figures.participation >= 0.9, figures
    assert 0.9 <= figures.rounds_per_period <= 1.1, figures
    assert min(figures.merged.values()) > 0.9, figures


def test_uploads_that_take_a_whole_step_cost_little() -> None:
    figures = measure(4, slowest_s=1.18, jitter=0.1, upload_s=1.0)

    assert figures.participation >= 0.9, figures


@pytest.mark.seconds
def test_a_learner_four_times_slower_neither_delays_others_nor_is_left_out() -> None:
    figures = measure(4, last_s=4.0)

    assert figures.participation >= 0.8, figures
    assert 0.95 <= figures.rounds_per_period <= 1.05, figures
    assert min(figures.merged.values()) > 0.9, figures


# ---------------------------------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("num_learners", [1, 3])
def test_without_faults_every_token_is_in_the_anchor_at_the_end(num_learners: int) -> None:
    fleet = Fleet(RunConfig(sync_every=6, num_fragments=3), network=Network(upload_s=0.4, download_s=0.4))
    for i in range(num_learners):
        fleet.start(f"l{i}", Pace(step_s=1.0 + 0.1 * i, jitter=0.1, tokens=10 + i, starts_s=1.3 * i, num_steps=40))
    fleet.run_to_the_end(limit_s=200.0)
    fleet.invariants.audit()

    trained = sum(x.state.tokens for x in fleet.learners.values() if x.state)
    totals = fleet.syncer.state.ledger.totals()
    assert [values[-1] for values in fleet.syncer.disk.anchors] == [trained] * 3
    assert (totals.merged, dict(totals.discarded), totals.pending) == (3 * trained, {}, 0)
    assert [x.is_last for x in fleet.learners.values()].count(True) == 1


@pytest.mark.seconds
def test_the_end_of_a_run_adds_no_rounds_for_requests_that_crossed_their_answers() -> None:
    fleet = Fleet(RunConfig(), network=Network(latency_s=0.3, upload_s=0.02, download_s=0.02))
    for i in range(4):
        fleet.start(f"l{i}", Pace(step_s=1.0 + 0.02 * i, jitter=0.05, num_steps=100))
    fleet.run_to_the_end(limit_s=200.0)
    fleet.invariants.audit()

    assert fleet.syncer.state.rounds.counts.num_aborted == 0
    assert fleet.participation > 0.9, fleet.participation
    assert dict(fleet.syncer.state.ledger.totals().discarded) == {}


def test_a_learner_whose_uploads_are_slow_is_merged_within_a_bounded_number_of_rounds() -> None:
    fleet = Fleet(
        RunConfig(sync_every=2, num_fragments=1, overlap=1, max_staleness_versions=1),
        network=Network(upload_s=0.1, download_s=0.1),
    )
    fleet.start("fast", Pace(step_s=1.0, tokens=1))
    fleet.start("slow", Pace(step_s=1.0, tokens=1, upload_factor=200.0))
    rounds_between, last = [], 0
    merged = 0
    for _ in range(600):
        fleet.run_for(1.0)
        now = fleet.syncer.state.ledger.account("slow", 1).num_merged
        if now > merged:
            rounds_between.append(fleet.syncer.state.rounds.fragments[0].version - last)
            merged, last = now, fleet.syncer.state.rounds.fragments[0].version
    fleet.invariants.audit()

    assert len(rounds_between) >= 3, rounds_between
    assert max(rounds_between) <= 24, rounds_between


def test_a_learner_with_a_cut_network_trains_on_and_all_is_merged_after_its_return() -> None:
    fleet = Fleet(RunConfig(sync_every=4, num_fragments=2, overlap=1, lease_s=3.0))
    one, two = (fleet.start(f"l{i}", Pace(step_s=1.0, num_steps=60)) for i in range(2))
    fleet.run_until(20.0)
    fleet.cut(one)
    fleet.run_until(40.0)
    assert fleet.syncer.state.ledger.totals().absent > 0
    assert one.state is not None
    assert one.state.step > 35
    fleet.heal(one)
    fleet.run_to_the_end(limit_s=200.0)
    fleet.invariants.audit()

    assert dict(fleet.syncer.state.ledger.totals().discarded) == {}
    assert (one.is_last, two.is_last).count(None) == 0


def test_a_killed_learner_loses_unmerged_tokens_and_its_successor_continues() -> None:
    fleet = Fleet(RunConfig(sync_every=4, num_fragments=2, overlap=1))
    fleet.start("other", Pace(step_s=1.0, num_steps=60))
    old = fleet.start("l0", Pace(step_s=1.0))
    fleet.run_until(20.5)
    fleet.kill(old)
    new = fleet.start("l0", Pace(step_s=1.0, num_steps=20, starts_s=1.0))
    fleet.run_to_the_end(limit_s=200.0)
    fleet.invariants.audit()

    assert new.state is not None
    assert (new.state.incarnation, new.error) == (2, None)
    discarded = fleet.syncer.state.ledger.totals().discarded
    assert set(discarded) == {"lapsed"}
    assert discarded["lapsed"] <= 2 * 100 * 6  # a period and what was in flight


def test_the_second_of_two_processes_with_one_name_is_rejected() -> None:
    fleet = Fleet(RunConfig(sync_every=4, num_fragments=2, overlap=1))
    first = fleet.start("l0", Pace(step_s=1.0, num_steps=20))
    second = fleet.start("l0", Pace(step_s=1.0, num_steps=20, starts_s=5.0))
    fleet.run_to_the_end(limit_s=100.0)

    assert first.error is None
    assert "learner id 'l0' is in use" in (second.error or "")


def test_rounds_do_not_wait_for_an_evaluating_learner() -> None:
    fleet = Fleet(RunConfig(sync_every=4, num_fragments=2, overlap=1, grace=30.0), seed=1)
    learners = [fleet.start(f"l{i}", Pace(step_s=1.0)) for i in range(2)]
    fleet.run_until(20.0)
    fleet.evaluate(learners[0], 20.0)
    fleet.run_until(22.0)
    before, landings = sum(f.version for f in fleet.syncer.state.rounds.fragments), len(learners[0].landings)
    fleet.run_until(39.0)

    assert sum(f.version for f in fleet.syncer.state.rounds.fragments) - before >= 6
    assert len(learners[0].landings) == landings
    fleet.run_until(60.0)
    assert len(learners[0].landings) > landings
    fleet.invariants.audit()


def test_a_rolled_back_disk_costs_the_lost_records_and_nothing_is_counted_twice() -> None:
    fleet = Fleet(RunConfig(sync_every=4, num_fragments=2, overlap=1))
    for i in range(2):
        fleet.start(f"l{i}", Pace(step_s=1.0, num_steps=60))
    fleet.run_until(30.0)
    before = [values[-1] for values in fleet.syncer.disk.anchors]
    fleet.syncer.restart(lose=5)
    assert [values[-1] for values in fleet.syncer.disk.anchors] != before
    fleet.run_to_the_end(limit_s=200.0)
    fleet.invariants.audit()

    assert fleet.syncer.state.rounds.generation == 1
    assert set(fleet.syncer.state.ledger.totals().discarded) == {"restored"}


# ----------------------------------------------------------------------------------------------------- random schedules


def schedule(seed: int, *, may_roll_back: bool) -> None:
    """Run a random fleet with random faults, with checks after every event and audits after every fault."""
    pick = random.Random(seed)
    num_fragments = pick.choice([1, 2, 4])
    config = RunConfig(
        sync_every=num_fragments * pick.choice([1, 2, 3]),
        num_fragments=num_fragments,
        overlap=pick.randint(1, num_fragments),
        quorum=pick.choice([1, 1, 2, 3]),
        grace=pick.choice(["adaptive", 0.0, 2.0]),
        lease_s=pick.choice([3.0, 15.0]),
        max_staleness_versions=pick.choice([1, 4]),
    )
    network = Network(
        latency_s=pick.choice([0.001, 0.05, 0.3]),
        upload_s=pick.choice([0.01, 0.4, 3.0]),
        download_s=pick.choice([0.01, 0.4, 2.0]),
        loss=pick.choice([0.0, 0.0, 0.1, 0.3]),
        repeats=pick.choice([0.0, 0.2]),
        jitter=pick.choice([0.0, 3.0]),
    )
    num_learners = pick.randint(1, 4)
    expect, guard = pick.choice([None, num_learners]), pick.choice([0.0, 0.0, 0.3])
    fleet = Fleet(config, network=network, seed=seed, expect=expect, guard=guard)
    align = pick.choice(["carry", "carry", "carry", "overwrite"])

    def pace(starts_s: float) -> Pace:
        return Pace(
            step_s=pick.choice([0.2, 0.3, 1.0]),
            jitter=0.1,
            tokens=pick.randint(1, 50),
            starts_s=starts_s,
            num_steps=pick.randint(5, 30),
            align=align,
            drain_s=20.0,
            upload_factor=pick.choice([1.0, 1.0, 8.0]),
        )

    for i in range(num_learners):
        fleet.start(f"l{i}", pace(5 * pick.random()))
    for _ in range(pick.randint(0, 6)):
        fleet.run_for(6 * pick.random())
        if there := [learner for learner in fleet.learners.values() if not learner.is_gone]:
            _strike(fleet, pick, pick.choice(there), pace, may_roll_back)
            fleet.invariants.audit()
    _recover(fleet)
    fleet.run_to_the_end(limit_s=fleet.now_s + 300)
    fleet.run_for(config.lease_s + 1.0)
    fleet.invariants.audit()
    fleet.syncer.state.finish()
    assert fleet.syncer.state.ledger.totals().pending == 0
    assert fleet.syncer.state.ledger.totals().is_exact
    if not may_roll_back:
        assert [learner.error for learner in fleet.learners.values() if learner.error] == []


def _strike(fleet: Fleet, pick: random.Random, learner: SimulatedLearner, pace, may_roll_back: bool) -> None:  # type: ignore[no-untyped-def]
    faults = ["kill", "cut", "heal", "restart", "join", "snapshot", "evaluate", "stall", "spoil", "fill the disk"]
    match pick.choice([*faults, "roll back"] if may_roll_back else faults):
        case "kill":
            fleet.kill(learner)
            fleet.start(learner.name, pace(1.5 + 3 * pick.random()))
        case "cut":
            fleet.cut(learner)
        case "heal":
            _recover(fleet)
        case "restart":
            fleet.syncer.restart(use_snapshot=pick.random() < 0.5)
        case "join":
            fleet.start(f"late{len(fleet.learners)}", pace(0.0))
        case "snapshot":
            fleet.syncer.disk.take_snapshot(fleet.syncer.state)
        case "evaluate" if learner.is_stepping and learner.state and learner.state.phase == "stepping":
            fleet.evaluate(learner, 10 * pick.random())
        case "stall":
            fleet.stall(learner, 10 * pick.random())
        case "spoil":
            learner.bad_payload = True
        case "fill the disk":
            fleet.syncer.disk_is_full = not fleet.syncer.disk_is_full
        case "roll back":
            fleet.syncer.restart(lose=pick.randint(1, 10), use_snapshot=pick.random() < 0.5)


def _recover(fleet: Fleet) -> None:
    fleet.syncer.disk_is_full = False
    for learner in fleet.learners.values():
        if learner.is_cut:
            fleet.heal(learner)


def rounds_with_a_standby(delay_s: float) -> int:
    """Return the commits of 16 learners with many leases and a standby that gets each record with this delay."""
    config = RunConfig(sync_every=24, num_fragments=12, overlap=2, quorum=8)
    fleet = Fleet(config, network=Network(latency_s=0.05, upload_s=0.5, download_s=0.5), seed=1)
    data = Data(sizes=(100_000,), range_size=64)
    for k in range(16):
        fleet.start(f"l{k}", Pace(step_s=0.5, tokens=16, jitter=0.1, data=data))
    fleet.run_for(10.0)
    fleet.syncer.add_standby(delay_s)
    fleet.run_for(60.0)
    return sum(f.version for f in fleet.syncer.state.rounds.fragments)


@pytest.mark.seconds
def test_a_distant_standby_does_not_slow_down_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    near = rounds_with_a_standby(0.001)
    assert rounds_with_a_standby(0.2) > 0.7 * near
    monkeypatch.setattr(syncer_module, "IN_FLIGHT", frozenset())
    assert rounds_with_a_standby(0.2) < 0.5 * near, "if each record waited for the one before"


@pytest.mark.seconds
@pytest.mark.parametrize("block", range(10))
def test_random_schedules_keep_every_invariant(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        schedule(seed, may_roll_back=seed % 3 == 0)


def test_a_learner_whose_activation_was_lost_may_leave() -> None:
    """Before, its leave was always ignored, because its hello to the restarted syncer had no effect."""
    schedule(2619, may_roll_back=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(30))
def test_many_random_schedules_keep_every_invariant(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        schedule(seed, may_roll_back=seed % 3 == 0)
