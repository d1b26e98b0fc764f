"""The printed form of a plan: memory, exchange, links, goodput, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_diloco.planner import bandwidth
from lightning_diloco.planner.fixes import Fix
from lightning_diloco.planner.memory import Items
from lightning_diloco.planner.plan import Forecast, Resource, gib, rate

_TIGHT = 0.8


def plan_view(
    path: Path, found: Forecast, fix: Fix | None, notes: Sequence[str], warnings: Sequence[str]
) -> RenderableType:
    """Return everything that `diloco plan` prints without `--json`."""
    said = [Text("assumed", style="bold"), *(Text(f"  {note}", style="dim") for note in notes)]
    said += [Text(warning, style="yellow") for warning in warnings]
    return Group(_head(path, found), _memory(found), _exchange(found), _resources(found), *said, _verdict(found, fix))


def _head(path: Path, found: Forecast) -> Text:
    training, fleet = found.scenario.training, found.scenario.fleet
    tokens = training.tokens_per_step
    batch = f", {tokens:,} tokens per step" if tokens else ""
    return Text(
        f"{path}: {training.num_parameters:,} parameters, {training.num_trainable:,} trained; "
        f"{fleet.num_learners} learners of {training.devices} device(s){batch}",
        style="bold",
    )


def _memory(found: Forecast) -> Table:
    table = Table(title="memory", title_justify="left", title_style="bold")
    for column in ("where", "what", "total"):
        table.add_column(column, justify="right" if column == "total" else "left")
    places = {"each device": found.device, "learner's host": found.host, "syncer": found.syncer, "disk": found.disk}
    for place, items in places.items():
        table.add_row(place, _items(items), gib(sum(items.values())))
    return table


def _items(items: Items) -> str:
    return ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in items.items() if nbytes)


def _exchange(found: Forecast) -> Table:
    scenario, sizes, way = found.scenario, found.sizes, found.exchange
    config, fleet = scenario.config, scenario.fleet
    each = bandwidth.learner_bps(sizes, config, fleet)
    parallel = bandwidth.data_parallel_bps(scenario.training, fleet)
    standby = f"standby {way.standby_s:.2f} s, " if way.standby_s else ""
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify, table.title_style = "exchange", "left", "bold"
    rows = {
        "fragments": f"{sizes.count} of up to {gib(sizes.nbytes)} as {config.wire}, "
        f"one every {way.period_s:.3g} s (H={config.sync_every}, {fleet.step_s:g} s per step)",
        "one fragment": f"upload {way.upload_s:.2f} s, merge {way.merge_s:.2f} s, log {way.log_s:.2f} s, "
        f"{standby}download {way.download_s:.2f} s; lands after {way.landing_s:.2f} s; overlap {way.overlap_s:.2f} s",
        "each learner": f"{rate(each)} each way; data parallel would need {rate(parallel)}, "
        f"{parallel / each:.0f} times as much",
        "syncer": f"{rate(each * fleet.num_learners)} each way; redo log "
        f"{bandwidth.log_bytes_per_s(sizes, config, fleet) / 1e6:.2f} MB/s",
        "joining": f"{way.adopt_s:.1f} s to adopt the anchors",
        "goodput": f"{found.goodput:.1%} expected; data parallel, one job over all: {found.data_parallel_goodput:.1%}",
    }
    if found.totals is not None:
        t = found.totals
        rows["whole run"] = (
            f"{t.rounds:.0f} rounds, {gib(t.bytes_up)} up, {gib(t.bytes_down)} down, {gib(t.log_bytes)} of log"
        )
    for name, said in rows.items():
        table.add_row(f"  {name}", said)
    return table


def _resources(found: Forecast) -> Table:
    table = Table(title="what may be too small", title_justify="left", title_style="bold")
    table.add_column("resource")
    table.add_column("load", justify="right")
    table.add_column("needed")
    for resource in sorted(found.resources, key=lambda r: -(r.load or 0.0)):
        table.add_row(resource.name, _load(resource), resource.needed)
    return table


def _load(resource: Resource) -> Text:
    if resource.load is None:
        return Text("-", style="dim")
    style = "green" if resource.load <= _TIGHT else "yellow" if resource.is_enough else "red"
    return Text(f"{resource.load:.0%}", style=style)


def _verdict(found: Forecast, fix: Fix | None) -> Text:
    tightest = found.tightest
    if fix is None:
        return Text(f"It fits. Tightest: {tightest.name}, {tightest.load or 0:.0%} in use.", style="bold green")
    return Text(
        f"It does not fit. Tightest: {tightest.name}, {tightest.load or 0:.0%}. Cheapest way out: {fix.text}",
        style="bold red",
    )
