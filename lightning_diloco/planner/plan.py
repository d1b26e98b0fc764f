"""Forecasts whether a run fits its machines: all resources, and the tightest one.

1. Rates are links, merge thread, disk and overlap. A rate fits if its load is at most 1. The overlap counts as a rate
   because updates that land too late increase the staleness of later rounds.
2. A capacity fits if the needed bytes do not exceed it. An unknown capacity is shown but not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lightning_diloco.config import RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.errors import ConfigError
from lightning_diloco.planner import bandwidth, goodput, memory
from lightning_diloco.planner.bandwidth import Exchange, Machines, Totals
from lightning_diloco.planner.memory import FragmentSizes, Items, Training

OVERLAP = "overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model, its options, and the machines of the run.

    Args:
        shapes: shapes of the trainable parameters; tied parameters appear once.
        mean_names: names of the embeddings among them.
        config: options of the run.
        training: the training job of one learner.
        fleet: the machines of all learners and the syncer.
        on_cpu: whether learners train on CPUs.
        mtbf_s: mean time between failures of one learner; None: no failures.
        restart_s: time from a failure to the first step of the new process, without the download of the anchors.
        pauses: share of time that a run without failures loses to validation and slow steps, 0..1.
        max_steps: steps of a learner; None if not fixed.
        device_capacity: bytes of one device; None: not checked. The same applies to the other capacities.
        host_capacity: bytes of a learner's host.
        syncer_capacity: bytes of the syncer's host.
        disk_capacity: bytes of the syncer's disk.
    """

    shapes: dict[str, tuple[int, ...]]
    mean_names: frozenset[str]
    config: RunConfig
    training: Training
    fleet: Machines
    on_cpu: bool = False
    mtbf_s: float | None = None
    restart_s: float = goodput.RESTART_S
    pauses: float = 0.0
    max_steps: int | None = None
    device_capacity: int | None = None
    host_capacity: int | None = None
    syncer_capacity: int | None = None
    disk_capacity: int | None = None

    def fragments(self) -> FragmentPlan:
        """Return the plan that a run has with these options."""
        return FragmentPlan.balanced(
            self.shapes,
            num_fragments=self.config.fragments_wanted,
            max_slice_numel=self.config.max_slice_numel,
            mean_names=self.mean_names,
        )


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that may be too small.

    Args:
        kind: "rate" if options of the run can change its load.
        name: name of the resource.
        load: needed amount divided by available amount; None if the latter is unknown.
        needed: description of the need.
        more: hardware to ask for if the resource is too small and no option helps.
    """

    kind: Literal["rate", "capacity"]
    name: str
    load: float | None
    needed: str
    more: str

    @property
    def is_enough(self) -> bool:
        """Return whether the resource fits or is not checked."""
        return self.load is None or self.load <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast of a scenario.

    Args:
        scenario: the scenario, with the plan's number of fragments.
        plan: the fragment plan.
        sizes: sizes of the fragments.
        exchange: timing of one exchange.
        device: bytes on each device of a learner, by item.
        host: bytes on a learner's host, by item.
        syncer: bytes in the syncer's memory, by item.
        disk: bytes on the syncer's disk, by item.
        resources: all resources that may be too small.
        stall: share of a step that the hooks take on the training thread.
        goodput: expected share of the planned tokens that is merged.
        data_parallel_goodput: the same for one data parallel job over all learners.
        totals: totals of the whole run; None if its length is not fixed.
    """

    scenario: Scenario
    plan: FragmentPlan
    sizes: FragmentSizes
    exchange: Exchange
    device: Items
    host: Items
    syncer: Items
    disk: Items
    resources: tuple[Resource, ...]
    stall: float
    goodput: float
    data_parallel_goodput: float
    totals: Totals | None

    @property
    def is_feasible(self) -> bool:
        """Return whether every resource is enough."""
        return all(resource.is_enough for resource in self.resources)

    @property
    def tightest(self) -> Resource:
        """Return the resource with the highest load."""
        return max(self.resources, key=lambda resource: resource.load or 0.0)


def forecast(scenario: Scenario) -> Forecast:
    """Compute the forecast of a scenario.

    Raises:
        ConfigError: the model has no parameters, options contradict each other, or there are too many shards.
    """
    scenario.config.validate()
    plan = scenario.fragments()
    # As in a run's manifest: fewer fragments if the model has fewer slices.
    overlap = min(scenario.config.overlap, plan.num_fragments)
    config = dataclasses.replace(scenario.config, num_fragments=plan.num_fragments, overlap=overlap)
    scenario = dataclasses.replace(scenario, config=config)
    training, fleet = scenario.training, scenario.fleet
    if not 1 <= fleet.num_shards <= plan.num_fragments:
        raise ConfigError(
            f"--shards {fleet.num_shards}: must be 1..{plan.num_fragments}; each shard holds at least one of the "
            f"{plan.num_fragments} fragments"
        )
    sizes = FragmentSizes.of(plan, config)
    exchange = Exchange.of(sizes, config, fleet)
    part = fleet.share(sizes.count)
    writing_s = part * memory.snapshot_bytes(sizes) / fleet.disk_bytes_per_s
    replaced = min(1.0, writing_s / bandwidth.sweep_s(config, fleet))
    items = {
        "device": memory.device_bytes(sizes, training),
        "host": memory.host_bytes(sizes, training, config.overlap),
        "syncer": memory.syncer_bytes(sizes, num_learners=fleet.num_learners, replaced=replaced, part=part),
        "disk": memory.disk_bytes(sizes, replaced=replaced, part=part),
    }
    stall = goodput.stall_share(sizes, training, exchange, on_cpu=scenario.on_cpu)
    lost: dict[str, Any] = {name: getattr(scenario, name) for name in ("mtbf_s", "restart_s", "pauses")}
    return Forecast(
        scenario=scenario,
        plan=plan,
        sizes=sizes,
        exchange=exchange,
        **items,
        resources=(*_rates(sizes, config, fleet, exchange), *_capacities(scenario, items)),
        stall=stall,
        goodput=goodput.expected_goodput(config, fleet, exchange, stall=stall, **lost),
        data_parallel_goodput=goodput.data_parallel_goodput(fleet, exchange, **lost),
        totals=None
        if scenario.max_steps is None
        else Totals.of(sizes, config, num_learners=fleet.num_learners, num_steps=scenario.max_steps),
    )


def _rates(sizes: FragmentSizes, config: RunConfig, fleet: Machines, exchange: Exchange) -> Iterator[Resource]:
    learner_bps = bandwidth.learner_bps(sizes, config, fleet)
    part = fleet.share(sizes.count)
    syncer_bps = part * learner_bps * fleet.num_learners
    log_bps = part * bandwidth.log_bytes_per_s(sizes, config, fleet)
    period_s = exchange.period_s / part  # between two fragments of the machine that has the most
    yield Resource(
        "rate",
        "learner's link",
        learner_bps / fleet.learner_stream_bps,
        f"{rate(learner_bps)} of {rate(fleet.learner_stream_bps)} usable",
        f"a link of {rate(learner_bps / bandwidth.LINK_SHARE)} for each learner",
    )
    yield Resource(
        "rate",
        "syncer's link",
        syncer_bps / fleet.syncer_usable_bps,
        f"{rate(syncer_bps)} of {rate(fleet.syncer_usable_bps)} usable",
        f"a link of {rate(syncer_bps / bandwidth.LINK_SHARE)} for the syncer",
    )
    yield Resource(
        "rate",
        "syncer's merge thread",
        exchange.merge_s / period_s,
        f"{exchange.merge_s:.2f} of {period_s:.2f} s per fragment",
        "a syncer with more cores and faster memory",
    )
    yield Resource(
        "rate",
        "syncer's disk",
        log_bps / fleet.disk_bytes_per_s,
        f"{log_bps / 1e6:.1f} of {fleet.disk_bytes_per_s / 1e6:.0f} MB/s",
        f"a disk that takes {log_bps / 1e6:.0f} MB/s",
    )
    if (usable_bps := fleet.standby_stream_bps) is not None:
        standby_bps = 8 * log_bps
        yield Resource(
            "rate",
            "standby's link",
            standby_bps / usable_bps,
            f"{rate(standby_bps)} of {rate(usable_bps)} usable",
            f"a link of {rate(standby_bps / bandwidth.LINK_SHARE)} to the standby, or more shards",
        )
    yield Resource(
        "rate",
        OVERLAP,
        exchange.landing_s / exchange.overlap_s,
        f"{exchange.landing_s:.2f} of {exchange.overlap_s:.2f} s ({config.overlap} steps)",
        "faster links",
    )


def _capacities(scenario: Scenario, items: dict[str, Items]) -> Iterator[Resource]:
    wanted = {
        "device": ("device memory", scenario.device_capacity, "more devices per learner, of {} together"),
        "host": ("host memory of a learner", scenario.host_capacity, "a host with {}"),
        "syncer": ("syncer memory", scenario.syncer_capacity, "a syncer with {}"),
        "disk": ("syncer's disk space", scenario.disk_capacity, "a disk with {}"),
    }
    for key, (name, capacity, more) in wanted.items():
        needed = sum(items[key].values())
        asked = needed * scenario.training.devices if key == "device" else needed
        of = ", not judged" if capacity is None else f" of {gib(capacity)}"
        load = None if capacity is None else needed / capacity
        yield Resource("capacity", name, load, f"{gib(needed)}{of}", more.format(gib(asked)))


def rate(bps: float) -> str:
    """Format bits per second for display."""
    return f"{bps / 1e9:.3g} Gbit/s" if bps >= 1e8 else f"{bps / 1e6:.3g} Mbit/s"


def gib(nbytes: float) -> str:
    """Format bytes for display."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
