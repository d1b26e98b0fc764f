"""Forecasts of goodput by the real state machines."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

import lightning_diloco.simulate
from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError
from lightning_diloco.planner.bandwidth import Exchange, Machines
from lightning_diloco.planner.goodput import expected_goodput
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.simulate import Fleet, Network, Pace, goodput, syncer
from lightning_diloco.simulate.chips import Chips, pauses, trained_s
from lightning_diloco.simulate.goodput import Outcome, Scenario, data_parallel, simulate
from lightning_diloco.syncer import service

CHIPS = Chips(count=64_000)
FLEET = Scenario(
    num_learners=4,
    chips=CHIPS,
    duration_s=400.0,
    network=Network(latency_s=0.02, upload_s=0.3, download_s=0.3),
    config=RunConfig(num_fragments=4, sync_every=8),
)
OFTEN = replace(FLEET, duration_s=1500.0, chips=replace(CHIPS, mtbi_s=64_000 * 100.0))


@pytest.fixture(scope="module")
def often() -> Outcome:
    return simulate(OFTEN)


def test_without_failures_all_work_is_merged() -> None:
    found = simulate(replace(FLEET, chips=replace(CHIPS, mtbi_s=1e12)))
    assert found.goodput > 0.99
    assert (found.uptime, found.participation, found.pauses, found.discarded) == (1.0, pytest.approx(1.0), 0, 0.0)
    assert found.rounds > 4 * 400 / 8 - 8
    assert found.merges == 4 * found.rounds


@pytest.mark.seconds
@pytest.mark.parametrize(("mtbf_s", "rejoin_s"), [(400.0, 30.0), (1200.0, 120.0)])
def test_the_closed_form_of_a_plan_agrees_with_the_simulation(mtbf_s: float, rejoin_s: float) -> None:
    """A plan must take seconds, so `diloco plan` uses the closed form."""
    config = RunConfig(num_fragments=2, sync_every=64)
    deaths = replace(
        FLEET, chips=replace(CHIPS, mtbi_s=1e12), duration_s=9000.0, config=config, mtbf_s=mtbf_s, rejoin_s=rejoin_s
    )
    simulated = fmean(simulate(replace(deaths, seed=seed)).goodput for seed in range(4))
    exchange = Exchange(
        upload_s=0.3,
        download_s=0.3,
        merge_s=0.1,
        log_s=0.1,
        standby_s=0.0,
        landing_s=0.8,
        overlap_s=2.0,
        period_s=32.0,
        adopt_s=0.0,
    )
    planned = expected_goodput(config, Machines(num_learners=4), exchange, stall=0.0, mtbf_s=mtbf_s, restart_s=rejoin_s)
    assert planned == pytest.approx(simulated, abs=0.02)
    assert simulated < 0.95


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("failures", "fewer"),
    [
        ({"outage_mtbf_s": 60.0, "outage_s": 30.0}, "merges"),
        ({"syncer_mtbf_s": 60.0, "syncer_back_s": 30.0}, "rounds"),
        ({"syncer_mtbf_s": 90.0, "syncer_back_s": 30.0, "num_shards": 4}, "rounds"),
    ],
)
def test_failures_of_a_link_or_of_the_syncer_cost_no_work(failures: dict[str, float], fewer: str) -> None:
    calm = replace(FLEET, chips=replace(CHIPS, mtbi_s=1e12))
    found = simulate(replace(calm, **failures))
    assert found.goodput > 0.99
    assert found.discarded == 0.0
    assert getattr(found, fewer) < 0.8 * getattr(simulate(calm), fewer), "fewer of them bring the same tokens"


@pytest.mark.seconds
@pytest.mark.parametrize("extra", [2, 4])
def test_extra_learners_save_their_share_of_the_time(extra: int) -> None:
    found = simulate(
        replace(FLEET, chips=replace(CHIPS, mtbi_s=1e12), duration_s=1000.0, num_extra=extra, extra_s=300.0)
    )
    assert found.work == pytest.approx(1 + 0.3 * extra / 4, rel=0.02)
    assert found.goodput > 0.98
    assert found.discarded == 0.0


def test_failures_cost_only_the_time_of_the_failed_learners(often: Outcome) -> None:
    alone = [
        trained_s(
            pauses(OFTEN.chips, random.Random(f"{OFTEN.seed} {k}"), until_s=OFTEN.length_s),
            step_s=1.0,
            until_s=OFTEN.length_s,
        )
        for k in range(OFTEN.num_learners)
    ]
    assert often.goodput == pytest.approx(sum(alone) / len(alone) / OFTEN.length_s, abs=0.01)
    assert often.goodput < 0.9
    assert often.discarded == 0.0
    assert 0.9 < often.uptime <= 1.0
    assert often.pauses > 4 * 1500 / 100 * 0.7


def test_a_learner_without_chips_at_time_0_does_not_train_until_they_return() -> None:
    alone = Chips(count=1, slice_chips=1, mtbi_s=60.0, return_s=5000.0)
    stops = list(pauses(alone, random.Random(f"{FLEET.seed} 0"), until_s=400.0))
    assert stops[0].ends_s > 400.0
    found = simulate(replace(FLEET, num_learners=1, chips=alone))
    assert found.work < 0.01
    assert found.uptime == 0.0


@pytest.mark.seconds
def test_the_same_seed_gives_the_same_result_and_another_one_another(often: Outcome) -> None:
    assert simulate(OFTEN) == often
    assert simulate(replace(OFTEN, seed=2)) != often


def test_more_learners_lose_less_and_data_parallel_training_loses_most(often: Outcome) -> None:
    elastic, rigid = (data_parallel(OFTEN, is_elastic=is_elastic) for is_elastic in (True, False))
    assert rigid.goodput < elastic.goodput < often.goodput - 0.1
    assert (elastic.rounds, elastic.participation) == (0, None)
    assert elastic.uptime == pytest.approx(elastic.goodput, abs=0.1)


def test_extra_chips_of_data_parallel_training_pay_for_the_exchange_between_sites() -> None:
    calm = replace(FLEET, chips=replace(CHIPS, mtbi_s=1e12, rescale_s=10.0), duration_s=1000.0)
    visit = replace(calm, num_extra=4, extra_s=300.0)
    near, far = (data_parallel(replace(visit, site_s=site_s), is_elastic=True) for site_s in (0.0, 1.0))
    assert data_parallel(calm, is_elastic=True).work == 1.0
    assert near.work == pytest.approx(0.7 - 0.01 + 2 * 0.29), "twice the chips; all stop for 10 s, twice"
    assert far.work == pytest.approx(0.7 - 0.01 + 2 * 0.145), "a ring of two sites: a step takes one more second"
    assert near.pauses == 2
    assert near.uptime == pytest.approx(0.98)
    assert near.goodput == pytest.approx(near.work / 1.3)


def test_training_is_returned_as_the_number_of_learners_over_time(often: Outcome) -> None:
    times, nums = zip(*often.training, strict=True)
    assert list(times) == sorted(times)
    assert nums[0] == 4
    assert {abs(one - other) for one, other in pairwise(nums)} == {1}
    assert min(nums) >= 0


@pytest.mark.seconds
def test_no_learner_waits_for_a_slow_one() -> None:
    mixed = replace(FLEET, chips=replace(CHIPS, mtbi_s=1e12), step_s=(1.0, 1.5))
    found = {quorum: simulate(replace(mixed, config=replace(mixed.config, quorum=quorum))) for quorum in (1, 4)}
    assert all(one.goodput > 0.98 for one in found.values())


@pytest.mark.seconds
def test_processes_that_die_lose_unmerged_tokens_and_return() -> None:
    dying = replace(FLEET, duration_s=1500.0, chips=replace(CHIPS, mtbi_s=1e12), mtbf_s=150.0, rejoin_s=20.0)
    found = simulate(dying)
    assert found.discarded > 0.01
    assert found.goodput == pytest.approx(1 - 20 / 150 - found.discarded, abs=0.06)
    assert found == simulate(dying)


def test_an_interruption_discards_the_step_in_progress_and_no_other() -> None:
    run = Fleet(RunConfig(num_fragments=4, sync_every=8), expect=1)
    learner = run.start("l0", Pace(step_s=1.0))
    run.run_until(10.5)
    assert learner.state is not None
    before = learner.state.step
    run.interrupt(learner, 5.0)
    run.run_until(15.4)
    assert learner.state.step == before, "the step that would have ended at 10.6 was discarded"
    run.run_until(16.6)
    assert learner.state.step == before + 1
    run.invariants.audit()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_learners": 0}, "0 learners; there must be at least one"),
        ({"chips": replace(CHIPS, count=10)}, "slices of 64"),
        ({"chips": replace(CHIPS, mtbi_s=0.0)}, "mean time between interruptions is too short"),
        ({"step_s": (1.0, 0.0)}, "step is too short"),
        ({"duration_s": 9.0}, "at least 10 of these steps; simulate at least 10 s"),
        ({"jitter": 1.0}, "below 1"),
        ({"mtbf_s": 0.0}, "mean time between deaths is too short"),
        ({"outage_mtbf_s": 0.0}, "mean time between outages is too short"),
        ({"syncer_mtbf_s": 0.0}, "mean time between failures of the syncer is too short"),
        ({"num_shards": 0}, "0 shards for"),
        ({"num_shards": 99}, "99 shards for"),
        ({"num_extra": 2}, "stay of extra learners is too short"),
        ({"num_extra": 2, "extra_s": 401.0}, "a part of the simulated time"),
        ({"num_extra": -1, "extra_s": 9.0}, "-1 extra learners"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate(replace(FLEET, **change))  # type: ignore[arg-type]


def test_the_simulator_uses_the_real_state_machines() -> None:
    assert syncer.SyncerState is service.SyncerState is SyncerState
    taken = ("quorum", "grace", "ledger", "lease", "electorate")
    for path in Path(lightning_diloco.simulate.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                assert not any(word in node.name.lower() for word in taken), f"{path.name} defines {node.name}"
    assert goodput.Fleet is Fleet
