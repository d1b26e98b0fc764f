"""Tables and plots of `diloco simulate`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_diloco.errors import ConfigError
from lightning_diloco.plots.style import quantity
from lightning_diloco.simulate.goodput import LEARNER_STEPS, Outcome, Scenario

_MEASURES = {"Goodput, simulated": "goodput", "Learners that take part in a round": "participation"}
_UNITS = {"grace": "[s]", "sync-every": "[steps]", "overlap": "[steps]", "link": "[bit/s]", "mtbi": "[s]"}


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated combination of options, or a baseline.

    Args:
        name: name of the simulated training, such as "8 learners" or "data parallel".
        num_learners: number of learners; 1 for data parallel training.
        chips: number of chips of all learners together.
        varied: options that have several values, by name, without the number of chips.
        scenario: the simulated scenario.
        found: the result.
    """

    name: str
    num_learners: int
    chips: float
    varied: Mapping[str, Any]
    scenario: Scenario
    found: Outcome

    @property
    def label(self) -> str:
        """Return the name with the options that vary."""
        return ", ".join([self.name, *(f"{name} {_short(value)}" for name, value in self.varied.items())])

    def figures(self) -> dict[str, Any]:
        """Return the values for `--json`: shares 0..1, times in seconds."""
        found = {field.name: getattr(self.found, field.name) for field in dataclasses.fields(self.found)}
        del found["training"]
        return {"run": self.name, "learners": self.num_learners, "chips": self.chips, **self.varied, **found}


def assumptions(rows: Sequence[Row]) -> list[str]:
    """Return the assumptions of the forecast, in sentences."""
    last = rows[-1].scenario
    chips, network = last.chips, last.network
    steps = " or ".join(f"{step_s:g} s" for step_s in last.step_s)
    return [
        f"each {chips.failures_per} fails once in {chips.mtbi_s / 86400:,.0f} days on average, independently; a "
        f"failure takes {chips.slice_chips:g} chip(s) away, half of the times for less than {chips.return_s:g} s",
        f"an elastic learner stands still for {chips.rescale_s:g} s after a failure, and trains on with the slices "
        f"that are left; those that return wait for the next failure, at most {chips.hold_s:g} s",
        f"a job that is not elastic restarts {chips.restart_s:g} s after a failure, on spare chips",
        "the step that a failure interrupts is lost; no other work is",
        f"a step takes {steps}; an upload {network.upload_s:.2g} s, a merge {2 * last.merge_s:.2g} s, a download "
        f"{network.download_s:.2g} s; {last.config.fragments_wanted} fragments, H = {last.config.sync_every}, "
        f"overlap {last.config.overlap}; the syncer has as many cores as it needs",
        "the communication of data parallel training takes no time" + " on one site" * (last.site_s > 0),
        "take part: contributors per learner that was stepping when the round opened; merged: number of contributions",
        *_deaths(last),
        *_outages(last),
        *_failures_of_the_syncer(last),
        *_extra(last),
        f"{LEARNER_STEPS:,} steps of all learners together are simulated"
        if last.duration_s is None
        else f"{last.duration_s:,.0f} s are simulated",
    ]


def _deaths(scenario: Scenario) -> list[str]:
    if scenario.mtbf_s is None:
        return []
    return [
        f"a learner's process dies every {scenario.mtbf_s:,.0f} s on average, loses what was not merged, and steps "
        f"again after {scenario.rejoin_s:g} s"
    ]


def _outages(scenario: Scenario) -> list[str]:
    if scenario.outage_mtbf_s is None:
        return []
    return [
        f"a learner's link fails every {scenario.outage_mtbf_s:,.0f} s on average, for {scenario.outage_s:g} s; the "
        "learner trains on, and its next contributions include this progress"
    ]


def _failures_of_the_syncer(scenario: Scenario) -> list[str]:
    if scenario.syncer_mtbf_s is None:
        return ["the syncer does not fail"]
    failing = f"fails every {scenario.syncer_mtbf_s:,.0f} s on average, for {scenario.syncer_back_s:g} s"
    found = [f"the syncer {failing}; it loses nothing, messages wait, and the learners train on"]
    if scenario.num_shards > 1:
        found.append(f"each of its {scenario.num_shards - 1} other shards {failing}; only its fragments wait")
    return found


def _extra(scenario: Scenario) -> list[str]:
    if not scenario.num_extra:
        return []
    return [
        f"{scenario.num_extra} more learners train for {scenario.extra_s:,.0f} s in the middle of the run; time: "
        "that of the merged tokens, relative to the time that the other learners would need without failures",
        "in data parallel training they are further sites, each as large as the first one; each step averages bfloat16 "
        f"gradients by a ring of the sites, {scenario.site_s:.2g} s from one site to another; all chips stop when they "
        "come and when they leave, as after a failure",
    ]


def show(rows: Sequence[Row]) -> None:
    """Print a table, with a column for each number of chips if there are several, and the assumptions."""
    console = Console()
    console.print(_by_chips(rows) if len({row.chips for row in rows}) > 1 else _by_figure(rows))
    console.print(Text("assumed", style="bold"))
    for sentence in assumptions(rows):
        console.print(Text(f"  {sentence}", style="dim"))


def _by_chips(rows: Sequence[Row]) -> Table:
    columns = sorted({row.chips for row in rows})
    table = _table("goodput", [_short(chips) for chips in columns])
    for label, cells in _by_label(rows).items():
        goodput = {row.chips: row.found.goodput for row in cells}
        table.add_row(label, *(f"{goodput[chips]:.1%}" for chips in columns))
    return table


def _by_figure(rows: Sequence[Row]) -> Table:
    columns = ["goodput", "uptime", "pauses", "take part", "rounds", "merged"]
    has_extra = any(row.scenario.num_extra for row in rows)
    columns += ["time"] if has_extra else []
    table = _table(f"{_short(rows[0].chips)} chips", columns)
    for row in rows:
        found = row.found
        cells = [f"{found.goodput:.1%}", f"{found.uptime:.1%}", f"{found.pauses:,}"]
        if found.participation is not None:
            cells += [f"{found.participation:.1%}", f"{found.rounds:,}", f"{found.merges:,}"]
        else:
            cells += ["", "", ""]
        cells += [f"{1 / found.work:.1%}"] if has_extra else []
        table.add_row(row.label, *cells)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def painter(path: Path) -> Callable[[Sequence[Row]], None]:
    """Return a function that draws a plot.

    It draws goodput over chips if there are several numbers of chips. If another option has several numbers, it draws
    goodput and participation over this option. Otherwise it draws training over time.

    Raises:
        ConfigError: the format is unknown, the folder cannot be written, or matplotlib is missing; raised before the
            simulation.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {path}: must end in .png or .svg")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"--plot {path}: {path.parent} is no writable folder; create it, or choose another path")
    try:
        from lightning_diloco.plots import forecast
    except ImportError as error:
        raise ConfigError(f"{error}: plots need matplotlib; pip install 'lightning-diloco[plot]'") from error

    def draw(rows: Sequence[Row]) -> None:
        if len({row.chips for row in rows}) > 1:
            cells = _by_label(rows).items()
            forecast.draw_goodput(
                {label: sorted((row.chips, row.found.goodput) for row in of) for label, of in cells}, path
            )
        elif (swept := _swept(rows)) is not None:
            panels = {title: _lines(rows, swept, measure) for title, measure in _MEASURES.items()}
            forecast.draw_sweep(panels, path, option=f"{swept} {_UNITS.get(swept, '')}".strip())
        else:
            lanes = {
                row.label: [(at_s, num / row.found.training[0][1]) for at_s, num in row.found.training] for row in rows
            }
            forecast.draw_training(lanes, path, until_s=min(row.scenario.length_s for row in rows))

    return draw


def _swept(rows: Sequence[Row]) -> str | None:
    """Return the option with the most different numbers; None if no option has several."""
    values: dict[str, set[float]] = {}
    for row in rows:
        for name, value in row.varied.items():
            if not isinstance(value, str):
                values.setdefault(name, set()).add(value)
    several = {name: len(found) for name, found in values.items() if len(found) > 1}
    return max(several, key=several.__getitem__, default=None)


def _lines(rows: Sequence[Row], swept: str, measure: str) -> dict[str, list[tuple[float, float]]]:
    """Return (value of the swept option, measure) by the label of the rest, for the rows that have both."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x, y = row.varied.get(swept), getattr(row.found, measure)
        if x is not None and not isinstance(x, str) and y is not None:
            rest = {name: value for name, value in row.varied.items() if name != swept}
            lines.setdefault(dataclasses.replace(row, varied=rest).label, []).append((x, y))
    return {label: sorted(points) for label, points in lines.items()}


def _by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(row.label for row in rows)
    return {label: [row for row in rows if row.label == label] for label in labels}


def _short(value: Any) -> str:
    return value if isinstance(value, str) else quantity(value)
