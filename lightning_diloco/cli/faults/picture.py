"""Draws a chaos run: one row of steps and faults per learner, and a row of commits below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.cli.faults.schedule import KINDS, LASTS_S, SYNCER
from lightning_diloco.cli.faults.story import Span, Story
from lightning_diloco.errors import ConfigError

# The Okabe-Ito palette, as in all plots. A learner's row is pale, so that faults stand out.
_COLORS = {
    "kill": "#D55E00",
    "stop": "#E69F00",
    "cut": "#CC79A7",
    "slow": "#56B4E9",
    "syncer": "#222222",
    "shard": "#009E73",
}
_STEPPING, _COMMITS = "#8FD3BD", "#0072B2"
_BREAK_S = 2.0
_DOTS_PER_INCH = 120


def draw(story: Story, path: Path, *, title: str) -> None:
    """Write the plot.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"the plot needs matplotlib ({error}); install lightning-diloco[plot]; the numbers are in chaos.json"
        ) from error
    from lightning_diloco.plots.style import SETTINGS

    with rc_context(SETTINGS):
        rows = [*sorted({*story.learners, *(f["target"] for f in story.faults)} - {SYNCER}), SYNCER]
        figure = Figure(figsize=(11, 1.1 + 0.5 * len(rows)), layout="constrained")
        _fill(figure.subplots(), story, rows, title)
        figure.savefig(path, dpi=_DOTS_PER_INCH)


def _fill(axes: Any, story: Story, rows: Sequence[str], title: str) -> None:
    begin_s = min((learner.first_s for learner in story.learners.values()), default=0.0)
    for name, learner in story.learners.items():
        spans = [(a - begin_s, b - a) for life in learner.lives for a, b in _stretches(life)]
        axes.broken_barh(spans, (rows.index(name) - 0.3, 0.6), color=_STEPPING, lw=0)
    times, below = [c.t - begin_s for c in story.commits if c.t >= begin_s], len(rows) - 1
    axes.vlines(times, below - 0.2, below + 0.2, color=_COMMITS, lw=0.3, alpha=0.5, label="commit")
    for kind in KINDS:
        _mark(axes, [f for f in story.faults if f["kind"] == kind], rows, begin_s)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, None), ylim=(len(rows) - 0.4, -0.6))
    axes.set_xlabel("seconds since the first step; filled: stepping")
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _mark(axes: Any, faults: Sequence[dict[str, Any]], rows: Sequence[str], begin_s: float) -> None:
    """Draw kills as crosses and lasting faults as bars below the learner's row; label the first of each kind."""
    for number, fault in enumerate(faults):
        kind, start_s, row = fault["kind"], fault["t"] - begin_s, rows.index(fault["target"])
        style = {"color": _COLORS[kind], "label": f"{kind}: {len(faults)}" if number == 0 else None}
        if kind in LASTS_S:
            axes.broken_barh([(start_s, fault["until_s"] - fault["t"])], (row + 0.3, 0.15), lw=0, **style)
        else:
            axes.plot(start_s, row, "X", markersize=8, linestyle="", markeredgecolor="white", **style)


def _stretches(life: Sequence[float]) -> list[Span]:
    """Return the intervals without a break of more than `_BREAK_S` between steps."""
    steps = [t for t in life if not math.isnan(t)]
    starts = [steps[0], *(b for a, b in pairwise(steps) if b - a > _BREAK_S)]
    stops = [*(a for a, b in pairwise(steps) if b - a > _BREAK_S), steps[-1]]
    return list(zip(starts, stops, strict=True))
