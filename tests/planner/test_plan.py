"""Checks whether a run fits: memory, rates and fixes, compared with sizes computed by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lightning_diloco.config import CHAIN_LENGTH, LearnerConfig, RunConfig
from lightning_diloco.core.quantize import encode, wire_nbytes
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.errors import ConfigError
from lightning_diloco.planner import bandwidth, goodput, memory
from lightning_diloco.planner.bandwidth import Exchange, Machines, Totals
from lightning_diloco.planner.fixes import cheapest_fix
from lightning_diloco.planner.memory import FragmentSizes, Training
from lightning_diloco.planner.plan import Forecast, Scenario, forecast, gib
from lightning_diloco.storage import snapshots
from lightning_diloco.syncer.anchors import AnchorStore

SHAPES = {"embed": (64, 32), "layer.0": (64, 64), "layer.1": (64, 64), "norm": (64,)}
NUM_PARAMETERS = sum(map(math.prod, SHAPES.values()))
LARGE = {f"layer.{k}": (4096, 4096) for k in range(720)}  # 12.08e9 parameters


def scenario(**changes: object) -> Scenario:
    small = Scenario(
        shapes=SHAPES,
        mean_names=frozenset({"embed"}),
        config=RunConfig(sync_every=8, num_fragments=4, overlap=2, block_size=32),
        training=Training(num_parameters=NUM_PARAMETERS, num_trainable=NUM_PARAMETERS),
        fleet=Machines(num_learners=2, link_bps=1e9, rtt_s=0.04, step_s=1.0),
    )
    return dataclasses.replace(small, **changes)


def large(**changes: object) -> Scenario:
    options: dict[str, object] = {"sync_every": 192, "num_fragments": 96, "overlap": 4}
    machines = {"num_learners": 8, "link_bps": 2e9, "rtt_s": 0.04, "step_s": 2.0}
    for name, value in changes.items():
        (options if name in options else machines)[name] = value
    return Scenario(
        shapes=LARGE,
        mean_names=frozenset(),
        config=RunConfig(**options),
        training=Training(num_parameters=12_079_595_520, num_trainable=12_079_595_520, param_bytes=2, devices=8),
        fleet=Machines(**machines),
    )


def load(found: Forecast, name: str) -> float:
    return next(r.load for r in found.resources if r.name == name and r.load is not None)


# --- sizes, against what the real objects hold ------------------------------------------------------------------------


def test_sizes_are_those_of_the_real_plan() -> None:
    found = forecast(scenario())
    config = found.scenario.config
    numels = [found.plan.layout(p, 32).padded_numel for p in range(found.plan.num_fragments)]
    assert found.sizes.total_numel == sum(numels)
    assert found.sizes.nbytes == max(wire_nbytes(numel, config.wire, 32) for numel in numels)


def test_a_contribution_has_the_predicted_bytes() -> None:
    found = forecast(scenario())
    values = torch.randn(found.sizes.numel)
    assert encode(values, wire="int8", block_size=32, name="x").nbytes == found.sizes.nbytes


def test_a_learner_holds_the_predicted_anchors_and_buffers() -> None:
    found = forecast(scenario())
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    device = CpuFragments(found.plan, params, found.scenario.config, LearnerConfig())
    held = sum(buffer.nbytes for buffer in (*device._anchors, *device._spare))
    assert held == found.device["anchors"] + found.device["exchange buffers"] - found.sizes.nbytes


def test_the_syncer_holds_the_predicted_state_and_updates() -> None:
    found = forecast(scenario())
    store = AnchorStore(found.plan, found.scenario.config)
    for p, layout in enumerate(store.layouts):
        store.seed(p, torch.randn(layout.padded_numel))
        for _ in range(CHAIN_LENGTH + 1):
            store.commit(p, torch.randn(layout.padded_numel).bfloat16(), work=1.0)
    tensors = [store.anchor(p).tensors() for p in range(len(store.layouts))]
    state = sum(t.nbytes for by_name in tensors for name, t in by_name.items() if t.dtype == torch.float32)
    assert state == found.syncer["master, published, momentum"]
    assert sum(by_name["chain"].nbytes for by_name in tensors) == found.syncer["last updates"]


def test_a_learner_s_devices_share_what_can_be_sharded() -> None:
    one, eight = (forecast(scenario(training=_training(devices=n))).device for n in (1, 8))
    for name, nbytes in one.items():
        assert eight[name] == nbytes // 8


def test_updates_that_are_overwritten_keep_a_residual() -> None:
    assert "residuals" not in forecast(scenario()).device
    assert forecast(scenario(training=_training(align="overwrite"))).device["residuals"] > 0


def _training(**changes: object) -> Training:
    return dataclasses.replace(scenario().training, **changes)


# --- time ------------------------------------------------------------------------------------------------------------


def test_an_upload_takes_a_round_trip_and_its_share_of_the_link() -> None:
    sizes = FragmentSizes(numel=10**9, total_numel=10**9, nbytes=10**8, total_nbytes=10**8, count=1)
    exchange = Exchange.of(sizes, RunConfig(), Machines(num_learners=2, link_bps=1e9, rtt_s=0.1, step_s=1))
    assert exchange.upload_s == pytest.approx(0.1 + 8e8 / 0.8e9)


def test_learners_share_the_syncer_s_link() -> None:
    alone = Machines(num_learners=4, link_bps=1e9)
    shared = dataclasses.replace(alone, syncer_link_bps=1e9)
    assert shared.stream_bps == pytest.approx(alone.stream_bps / 4)


def test_shards_share_what_the_syncer_holds_receives_and_writes() -> None:
    one, seven = forecast(large()), forecast(large(num_shards=7))
    part = 14 / 96  # seven machines hold 13 or 14 of 96 fragments
    for name in ("syncer's link", "syncer's merge thread", "syncer's disk"):
        assert load(seven, name) == pytest.approx(part * load(one, name))
    for name in ("learner's link", "overlap"):
        assert load(seven, name) == load(one, name)
    state = "master, published, momentum"
    assert seven.syncer[state] == pytest.approx(part * one.syncer[state])
    layouts = [seven.plan.layout(p, 256).padded_numel for p in range(0, 96, 7)]
    assert seven.syncer[state] == pytest.approx(12 * sum(layouts), rel=0.01)
    assert sum(seven.disk.values()) == pytest.approx(part * sum(one.disk.values()), rel=0.05)


def test_a_standby_gets_each_record_before_the_offer() -> None:
    alone, beside = forecast(large()), forecast(large(standby_link_bps=2.5e9))
    numel = beside.sizes.numel
    copied_s = 0.04 + 8 * (2 * numel + 1024) / 2e9 + (2 * numel + 1024) / 1e9
    assert beside.exchange.standby_s == pytest.approx(copied_s)
    assert beside.exchange.landing_s == pytest.approx(alone.exchange.landing_s + copied_s)
    assert alone.exchange.standby_s == 0.0
    assert load(beside, "standby's link") == pytest.approx(
        8 * 2 * sum(map(math.prod, LARGE.values())) / 384 / 2e9, rel=0.01
    )
    shared = forecast(large(standby_link_bps=2.5e9, num_shards=4))
    assert load(shared, "standby's link") == pytest.approx(load(beside, "standby's link") / 4, rel=0.01)
    with pytest.raises(ConfigError, match="standby_link_bps: found 0; must be above 0"):
        Machines(standby_link_bps=0)


@pytest.mark.parametrize("num_shards", [0, 5])
def test_each_shard_needs_a_fragment(num_shards: int) -> None:
    with pytest.raises(ConfigError, match=rf"--shards {num_shards}: must be 1\.\.4"):
        forecast(scenario(fleet=Machines(num_shards=num_shards)))


def test_averages_add_up_over_a_sweep() -> None:
    found = forecast(scenario())
    config, fleet = found.scenario.config, found.scenario.fleet
    sweep_s = config.sync_every * fleet.step_s
    assert found.exchange.period_s * found.sizes.count == pytest.approx(sweep_s)
    assert bandwidth.learner_bps(found.sizes, config, fleet) * sweep_s == 8 * found.sizes.total_nbytes


def test_data_parallel_needs_a_hundred_times_the_bandwidth() -> None:
    found = forecast(large())
    each = bandwidth.learner_bps(found.sizes, found.scenario.config, found.scenario.fleet)
    parallel = bandwidth.data_parallel_bps(found.scenario.training, found.scenario.fleet)
    assert parallel == pytest.approx(8 * 2 * 7 / 8 * 2 * 12_079_595_520 / 2.0)
    assert parallel / each > 100


def test_totals_of_a_run_count_start_rounds_and_drain() -> None:
    found = forecast(scenario(max_steps=80))
    totals = found.totals
    assert totals is not None
    assert totals == Totals.of(found.sizes, found.scenario.config, num_learners=2, num_steps=80)
    assert totals.rounds == (80 / 8 - (1 - 2 / 8) + 2) * 4
    assert totals.bytes_down - totals.bytes_up == 4 * found.sizes.total_numel


# --- goodput ---------------------------------------------------------------------------------------------------------


def test_without_failures_only_the_stall_is_lost() -> None:
    found = forecast(scenario())
    assert 0.999 < found.goodput < 1
    assert found.data_parallel_goodput == 1


@pytest.mark.parametrize("mtbf_s", [None, 6 * 3600.0])
def test_pauses_are_lost_with_and_without_failures(mtbf_s: float | None) -> None:
    without, paused = (forecast(dataclasses.replace(large(), mtbf_s=mtbf_s, pauses=share)) for share in (0.0, 0.25))
    assert paused.goodput == pytest.approx(0.75 * without.goodput)
    assert paused.data_parallel_goodput == pytest.approx(0.75 * without.data_parallel_goodput)


@pytest.mark.parametrize("mtbf_s", [1800.0, 6 * 3600.0, 7 * 86400.0])
def test_failures_cost_data_parallel_more_and_less_when_rarer(mtbf_s: float) -> None:
    found = forecast(dataclasses.replace(large(), mtbf_s=mtbf_s))
    rarer = forecast(dataclasses.replace(large(), mtbf_s=2 * mtbf_s))
    assert found.data_parallel_goodput < found.goodput < rarer.goodput < 1


def test_goodput_with_failures_equals_the_closed_form() -> None:
    found = forecast(dataclasses.replace(large(), mtbf_s=6 * 3600.0, restart_s=100.0))
    down_s = 100.0 + found.exchange.adopt_s
    lost_s = 192 * 2.0 / 2 + found.exchange.landing_s
    wanted = math.exp(-(down_s + lost_s) / 21600)
    stall = goodput.stall_share(found.sizes, found.scenario.training, found.exchange, on_cpu=False)
    assert found.goodput == pytest.approx(wanted * (1 - stall))


# --- verdict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link_bps", [2e9, 5e9])
def test_twelve_billion_parameters_fit_eight_learners(link_bps: float) -> None:
    found = forecast(large(link_bps=link_bps))
    assert found.is_feasible
    assert cheapest_fix(found) is None


@pytest.mark.parametrize(
    ("changes", "tightest"),
    [
        ({"link_bps": 1e8}, "learner's link"),
        ({"syncer_link_bps": 1e9}, "syncer's link"),
        ({"syncer_cores": 1, "memory_bytes_per_s": 1e9}, "syncer's merge thread"),
        ({"overlap": 1}, "overlap"),
        ({"disk_bytes_per_s": 2e7}, "syncer's disk"),
    ],
)
def test_a_resource_that_is_too_small_is_named_and_the_fix_works(changes: dict[str, float], tightest: str) -> None:
    found = forecast(large(**changes))
    assert not found.is_feasible
    assert load(found, tightest) > 1
    fix = cheapest_fix(found)
    assert fix is not None
    config = dataclasses.replace(found.scenario.config, **fix.options)
    assert forecast(dataclasses.replace(found.scenario, config=config)).is_feasible


def test_the_overlap_is_changed_before_anything_else() -> None:
    fix = cheapest_fix(forecast(large(overlap=1)))
    assert fix is not None
    assert fix.options.keys() == {"overlap"}
    assert fix.text == f"--overlap {fix.options['overlap']}"


def test_a_link_that_no_option_helps_asks_for_a_larger_one() -> None:
    found = forecast(large(link_bps=1e6))
    assert found.resources[0].needed.endswith(" of 0.8 Mbit/s usable")
    fix = cheapest_fix(found)
    assert fix is not None
    assert not fix.options
    assert "Gbit/s for each learner" in fix.text


@pytest.mark.parametrize("capacity", ["device_capacity", "host_capacity", "syncer_capacity", "disk_capacity"])
def test_a_known_capacity_is_checked(capacity: str) -> None:
    assert forecast(scenario()).is_feasible
    found = forecast(scenario(**{capacity: 1000}))
    assert not found.is_feasible
    fix = cheapest_fix(found)
    assert fix is not None
    assert not fix.options
    assert fix.text


def test_a_model_with_few_slices_gets_fewer_fragments() -> None:
    found = forecast(scenario(shapes={"w": (2, 8)}, mean_names=frozenset()))
    assert found.sizes.count == found.plan.num_fragments <= 2
    assert found.scenario.config.overlap <= found.sizes.count


def test_the_forecast_of_the_log_is_that_of_the_syncer() -> None:
    assert memory.MIN_LOG_BYTES == snapshots.MIN_LOG_BYTES


def test_a_long_snapshot_keeps_its_state_in_memory() -> None:
    sizes = forecast(large()).sizes
    none, half = (memory.syncer_bytes(sizes, num_learners=8, replaced=share) for share in (0.0, 0.5))
    assert sum(half.values()) - sum(none.values()) == 6 * sizes.total_numel


@pytest.mark.parametrize(
    ("nbytes", "text"), [(5, "5 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (80 << 30, "80.0 GiB")]
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert gib(nbytes) == text
