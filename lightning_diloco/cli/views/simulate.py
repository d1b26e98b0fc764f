"""Tables and plots of `diloco simulate`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_diloco.cli.scenarios.options import VARIED, dashed
from lightning_diloco.cli.scenarios.rows import AS_TIMES, Row
from lightning_diloco.cli.text.quantities import as_time
from lightning_diloco.errors import ConfigError
from lightning_diloco.planner.plan import rate
from lightning_diloco.plots.style import quantity
from lightning_diloco.simulate.chips import RETURN_SHAPES, WARM_UP
from lightning_diloco.simulate.goodput import DATA_PARALLEL_STEPS, DRAIN_S, LEARNER_STEPS

_MEASURES = {"Goodput, simulated": "goodput", "Learners that take part in a round": "participation"}
_UNITS = {"sync_every": " [steps]", "overlap": " [steps]", "link": " [bit/s]"}
_NAMED = 4  # values that are listed; of more, the range is


def assumptions(rows: Sequence[Row]) -> list[str]:
    """Return the assumptions of the forecast, in sentences; what differs between rows is listed."""
    fleets = [row for row in rows if row.baseline is None]
    baselines = {row.baseline for row in rows} - {None}
    return [
        *_failures(fleets),
        *(_rigid(fleets) if "dp" in baselines else ()),
        "a failure of a chip costs the step that it interrupts, and no other work",
        *_exchanges(fleets),
        *(_parallel(fleets) if baselines else ()),
        "take part: contributors per learner that was stepping when the round opened; merged: number of contributions",
        *_deaths(fleets),
        *_outages(fleets),
        *_failures_of_the_syncer(fleets),
        *_extra(fleets),
        *_length(fleets, has_baseline=bool(baselines)),
    ]


def _failures(rows: Sequence[Row]) -> list[str]:
    outer, inner = RETURN_SHAPES
    earlier = _named([WARM_UP * row.scenario.chips.return_s for row in rows], as_time)
    return [
        f"each {_all(rows, 'failures_per')} fails once in {_all(rows, 'mtbi', as_time)} on average, independently; a "
        f"failure takes {_all(rows, 'slice', quantity)} chip(s) away, half of the times for less than "
        f"{_all(rows, 'return', as_time)} (exponentiated Weibull distribution, exponents {outer:g} and {inner:g})",
        f"failures begin {earlier} before the simulation, so that slices are missing from its start; all of the "
        "simulated time counts",
        f"an elastic learner stands still for {_all(rows, 'rescale', as_time)} after a failure, and trains on with the "
        "slices that are left; those that return wait for the next failure, at most "
        f"{_all(rows, 'hold', as_time)}",
    ]


def _rigid(rows: Sequence[Row]) -> list[str]:
    restart = _all(rows, "restart", as_time)
    return [f"a job that is not elastic restarts {restart} after a failure, on spare chips"]


def _exchanges(rows: Sequence[Row]) -> list[str]:
    steps = " or ".join(map(as_time, rows[0].scenario.step_s))
    upload = _named([row.scenario.network.upload_s for row in rows], as_time)
    merge = _named([2 * row.scenario.merge_s for row in rows], as_time)
    download = _named([row.scenario.network.download_s for row in rows], as_time)
    found = [
        f"a step takes {steps}, with spread {_all(rows, 'spread', _share)} and jitter {_all(rows, 'jitter', _share)}",
        f"{_all(rows, 'parameters', _integer)} parameters, "
        f"{_named([row.scenario.config.fragments_wanted for row in rows])} fragments, "
        f"{_named([row.scenario.config.wire for row in rows])} on the wire; H = {_all(rows, 'sync_every')}, "
        f"K = {_all(rows, 'quorum')}, tau = {_all(rows, 'overlap')}, grace {_all(rows, 'grace', _grace)}",
        f"each learner's link has {_all(rows, 'link', rate)}, a round trip takes {_all(rows, 'rtt', as_time)}; an "
        f"upload takes {upload}, a merge {merge}, a download {download}; the syncer has as many cores as it needs",
    ]
    if rows[0].options["standby_link"] is not None:
        found.append(f"a merge includes the copy to a standby, over {_all(rows, 'standby_link', rate)}")
    return found


def _parallel(rows: Sequence[Row]) -> list[str]:
    found = [
        "the communication of data parallel training takes no time" + " on one site" * _has_extra(rows),
        "data parallel training steps like the slowest --step, to which its goodput is relative; it has no spread, no "
        "jitter, no deaths of processes, no outages and no syncer",
    ]
    if _has_extra(rows):
        found.append(
            "in data parallel training, the extra learners are further sites, each as large as the first one; each "
            "step averages bfloat16 gradients by a ring of the sites, "
            f"{_named([row.scenario.site_s for row in rows], as_time)} from one site to another; all chips stop when "
            "they come and when they leave, as after a failure"
        )
    return found


def _deaths(rows: Sequence[Row]) -> list[str]:
    if rows[0].scenario.mtbf_s is None:
        return []
    return [
        f"a learner's process dies every {_all(rows, 'mtbf', as_time)} on average, loses what was not merged, and "
        f"steps again after {_all(rows, 'rejoin', as_time)}"
    ]


def _outages(rows: Sequence[Row]) -> list[str]:
    if rows[0].scenario.outage_mtbf_s is None:
        return []
    return [
        f"a learner's link fails every {_all(rows, 'outage_every', as_time)} on average, for "
        f"{_all(rows, 'outage', as_time)}; the learner trains on, and its next contributions include this progress"
    ]


def _failures_of_the_syncer(rows: Sequence[Row]) -> list[str]:
    if rows[0].scenario.syncer_mtbf_s is None:
        return ["the syncer does not fail"]
    failing = f"fails every {_all(rows, 'syncer_mtbf', as_time)} on average, for {_all(rows, 'syncer_back', as_time)}"
    found = [f"the syncer {failing}; it loses nothing, messages wait, and the learners train on"]
    if (num_shards := rows[0].scenario.num_shards) > 1:
        found.append(f"each of its {num_shards - 1} other shard(s) {failing}; only its fragments wait")
    return found


def _extra(rows: Sequence[Row]) -> list[str]:
    if not _has_extra(rows):
        return []
    return [
        f"{_all(rows, 'extra')} more learners train for {_all(rows, 'extra_for', as_time)} in the middle of the run; "
        "time: that of the merged tokens, relative to the time that the other learners would need without failures"
    ]


def _length(rows: Sequence[Row], *, has_baseline: bool) -> list[str]:
    length = _named([row.scenario.length_s for row in rows], as_time)
    if rows[0].scenario.duration_s is None:
        length += f", {LEARNER_STEPS:,} steps of all learners together, if all are as fast as the fastest"
        length += f" (data parallel training: {DATA_PARALLEL_STEPS:,} steps)" * (has_baseline and not _has_extra(rows))
    return [f"simulated: {length}, and a drain of at most {as_time(DRAIN_S)}; seed {_all(rows, 'seed')}"]


def _has_extra(rows: Sequence[Row]) -> bool:
    return any(row.scenario.num_extra for row in rows)


def _all(rows: Sequence[Row], option: str, shown: Callable[[Any], str] = str) -> str:
    """Return the values of an option in all rows."""
    return _named([row.options[option] for row in rows], shown)


def _named(values: Iterable[Any], shown: Callable[[Any], str] = str) -> str:
    """Return the different values, as a range if there are many."""
    ordered = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    texts = list(dict.fromkeys(map(shown, ordered)))
    return " or ".join(texts) if len(texts) <= _NAMED else f"{texts[0]} to {texts[-1]}"


def _integer(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.3g}%"


def _grace(value: float | str) -> str:
    return value if isinstance(value, str) else as_time(value)


def show(rows: Sequence[Row]) -> None:
    """Print a table, with a column for each number of chips if there are several, and the assumptions."""
    console = Console()
    console.print(_by_chips(rows) if len({row.chips for row in rows}) > 1 else _by_figure(rows))
    console.print(Text("assumed", style="bold"))
    for sentence in assumptions(rows):
        console.print(Text(f"  {sentence}", style="dim"))


def _by_chips(rows: Sequence[Row]) -> Table:
    columns = sorted({row.chips for row in rows})
    table = _table("goodput", [quantity(chips) for chips in columns])
    for label, cells in _by_label(rows).items():
        goodput = {row.chips: row.found.goodput for row in cells}
        table.add_row(label, *(f"{goodput[chips]:.1%}" for chips in columns))
    return table


def _by_figure(rows: Sequence[Row]) -> Table:
    columns = ["goodput", "uptime", "pauses", "take part", "rounds", "merged"]
    has_extra = any(row.scenario.num_extra for row in rows)
    columns += ["time"] if has_extra else []
    table = _table(f"{quantity(rows[0].chips)} chips", columns)
    for row in rows:
        found = row.found
        cells = [f"{found.goodput:.1%}", f"{found.uptime:.1%}", f"{found.pauses:,}"]
        cells += ["" if found.participation is None else f"{found.participation:.1%}"]
        cells += [f"{found.rounds:,}", f"{found.merges:,}"] if row.baseline is None else ["", ""]
        cells += [f"{1 / found.work:.1%}" if found.work else "never"] if has_extra else []
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
            option = dashed(swept) + _UNITS.get(swept, "")
            forecast.draw_sweep(panels, path, option=option, shown=as_time if swept in AS_TIMES else quantity)
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
    several = {name: len(values[name]) for name in VARIED if len(values.get(name, ())) > 1}
    return max(several, key=several.__getitem__, default=None)


def _lines(rows: Sequence[Row], swept: str, measure: str) -> dict[str, list[tuple[float, float]]]:
    """Return (value of the swept option, measure) by the label of the rest, for the rows that have both.

    A value that is no number has a horizontal line of its own.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    numbers = [x for row in rows if not isinstance(x := row.varied.get(swept, ""), str)]
    for row in rows:
        x, y = row.varied.get(swept), getattr(row.found, measure)
        if isinstance(x, str) and y is not None:
            lines[row.label] = [(min(numbers), y), (max(numbers), y)]
        elif x is not None and y is not None:
            rest = {name: value for name, value in row.varied.items() if name != swept}
            lines.setdefault(dataclasses.replace(row, varied=rest).label, []).append((x, y))
    return {label: sorted(points) for label, points in lines.items()}


def _by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(row.label for row in rows)
    return {label: [row for row in rows if row.label == label] for label in labels}
