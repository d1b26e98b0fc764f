"""Plot files of a run, each as PNG and SVG.

| file | content |
|---|---|
| timeline | a lane per learner: stepping, evaluating, offline, joins, lapses, leaves; merged work; commits |
| loss | training and validation loss over tokens, time and bytes |
| goodput | goodput so far, and participation |
| versions | each fragment's version |
| bandwidth | bits per second at the syncer |
| overview | timeline, loss over tokens, goodput and traffic on one page |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from lightning_diloco.plots import panels
from lightning_diloco.plots.story import Story
from lightning_diloco.plots.style import FAINT, SETTINGS

_WIDTH = 9.0
_FORMATS = ("png", "svg")


def draw_all(story: Story, folder: Path, *, cap_bps: float | None = None) -> list[Path]:
    """Write all plots and return their paths.

    Args:
        story: the run's story.
        folder: target folder, created if necessary.
        cap_bps: bits per second of the syncer's link, drawn into the traffic plot.
    """
    pictures: dict[str, Callable[[Story], Figure]] = {
        "timeline": lambda story: _single(story, panels.timeline, height=1.1 + 0.55 * (len(story.lanes) + 1)),
        "loss": _losses,
        "goodput": lambda story: _single(story, panels.goodput),
        "versions": lambda story: _single(story, panels.versions, height=3.6),
        "bandwidth": lambda story: _single(story, lambda axes, of: panels.bandwidth(axes, of, cap_bps=cap_bps)),
        "overview": lambda story: _overview(story, cap_bps),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(SETTINGS):
        for name, picture in pictures.items():
            figure = picture(story)
            for kind in _FORMATS:
                path = folder / f"{name}.{kind}"
                figure.savefig(path, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
    return written


def _single(story: Story, panel: Callable[[Any, Story], None], *, height: float = 2.8) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    panel(figure.subplots(), story)
    return figure


def _losses(story: Story) -> Figure:
    figure = Figure(figsize=(_WIDTH, 3.2), layout="constrained")
    columns = figure.subplots(1, 3, sharey=True)
    for axes, over in zip(columns, ("tokens", "seconds", "bytes"), strict=True):
        panels.loss(axes, story, over=over, names=axes is columns[-1])
    columns[0].set(ylabel="loss, nats per token")
    columns[0].set_title("Loss over tokens, time and bytes")
    return figure


def _overview(story: Story, cap_bps: float | None) -> Figure:
    lanes = 0.9 + 0.45 * (len(story.lanes) + 1)
    figure = Figure(figsize=(_WIDTH, lanes + 3.0 + 2 * 2.0), layout="constrained")
    fleet, losses, share, traffic = figure.subplots(4, 1, height_ratios=(lanes, 3.0, 2.0, 2.0))
    panels.timeline(fleet, story)
    panels.loss(losses, story, over="tokens")
    losses.set(ylabel="nats per token")
    losses.set_title("Loss")
    panels.goodput(share, story)
    panels.bandwidth(traffic, story, cap_bps=cap_bps)
    if story.summary:
        figure.text(0.995, 0.001, f"run {story.summary['run']}", ha="right", va="bottom", color=FAINT, fontsize=7)
    return figure
