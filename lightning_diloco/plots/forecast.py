"""Plots of `diloco simulate`: goodput over chips or over another option, and training over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lightning_diloco.plots.style import SETTINGS, color_of, label_ends, quantity

Points = Sequence[tuple[float, float]]

_SHOWN_S = 3600.0
_PANEL_HEIGHT, _LABEL_HEIGHT = 2.3, 0.25  # inches: of a panel, and of each label in it


def draw_goodput(lines: Mapping[str, Points], path: Path, *, dots: Mapping[str, Points] | None = None) -> None:
    """Draw a line per fleet.

    Args:
        lines: (chips, goodput) by label.
        path: PNG or SVG.
        dots: published figures of the same fleets; None: dots mark the points of the lines.
    """
    with rc_context(SETTINGS):
        figure = Figure(figsize=(7.5, 3.6), layout="constrained")
        axes: Any = figure.subplots()
        ends = []
        for label, color in color_of(lines).items():
            xs, ys = zip(*lines[label], strict=True)
            axes.plot(xs, ys, color=color)
            axes.plot(*zip(*(dots or lines)[label], strict=True), "o", markersize=3.5, color=color)
            ends.append((xs[-1], ys[-1], label, color))
        axes.set(xscale="log", xticks=sorted({x for points in lines.values() for x, _ in points}), ylim=(0, 1.02))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(quantity)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set(xlabel="chips", title="Goodput, simulated" + (" (lines) and published (dots)" if dots else ""))
        label_ends(axes, ends)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_sweep(
    panels: Mapping[str, Mapping[str, Points]], path: Path, *, option: str, shown: Callable[[float], str] = quantity
) -> None:
    """Draw shares over an option, in a panel per measure.

    Args:
        panels: by title, (value of the option, share) by label.
        path: PNG or SVG.
        option: name of the option, with its unit.
        shown: formats a value of the option.
    """
    with rc_context(SETTINGS):
        colors = color_of(dict.fromkeys(label for lines in panels.values() for label in lines))
        height = max(_PANEL_HEIGHT, _LABEL_HEIGHT * len(colors))
        figure = Figure(figsize=(7.5, height * len(panels)), layout="constrained")
        column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        values = sorted({x for lines in panels.values() for points in lines.values() for x, _ in points})
        for axes, (title, lines) in zip(column, panels.items(), strict=True):
            axes.set(xscale="log" if values[0] > 0 else "linear", ylim=(0, 1.05), title=title)
            axes.set_xticks(values, [shown(value) for value in values])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            for label, points in lines.items():
                axes.plot(*zip(*points, strict=True), "o-", markersize=3.5, color=colors[label])
        column[-1].set(xlabel=option)
        figure.draw_without_rendering()  # labels need the height of the panels
        for axes, lines in zip(column, panels.values(), strict=True):
            label_ends(axes, [(*points[-1], label, colors[label]) for label, points in lines.items()])
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_training(lanes: Mapping[str, Points], path: Path, *, until_s: float) -> None:
    """Draw which share of the learners trains, in a lane per fleet.

    Args:
        lanes: (seconds, share from then on) by label.
        path: PNG or SVG.
        until_s: end of the simulation; at most the first hour is drawn.
    """
    until_s = min(until_s, _SHOWN_S)
    with rc_context(SETTINGS):
        figure = Figure(figsize=(7.5, 0.9 + 0.9 * len(lanes)), layout="constrained")
        column = figure.subplots(len(lanes), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, color) in zip(column, color_of(lanes).items(), strict=True):
            shown = [(at_s / 60, share) for at_s, share in lanes[label] if at_s <= until_s]
            xs, ys = zip(*shown, (until_s / 60, shown[-1][1]), strict=True)
            axes.fill_between(xs, ys, step="post", color=color, alpha=0.8, linewidth=0)
            axes.set(ylim=(0, 1), xlim=(0, until_s / 60))
            axes.set_title(label, fontsize=9)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        column[-1].set(xlabel="minutes")
        figure.suptitle(
            "Share of the learners that train, simulated", x=0.01, ha="left", fontweight="bold", fontsize=10
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
