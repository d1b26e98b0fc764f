"""Style of all plots: one colour per learner, direct labels instead of legends, no frames.

The colours are those of Okabe and Ito, which are suitable for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

LEARNERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
INK, FAINT, GRID = "#222222", "#777777", "#E3E3E3"
ANCHOR = "#111111"
LABEL_GAP = 11.0
PHASES = {"evaluating": 0.45, "draining": 0.7, "joining": 0.25, "stalled": 0.25, "stepping": 1.0}

SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "text.color": INK,
    "lines.linewidth": 1.4,
    "figure.dpi": 120,
    "savefig.bbox": "tight",
    "svg.hashsalt": "lightning_diloco",  # makes the files reproducible
}


def color_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each learner, in the order of the names."""
    return {name: LEARNERS[k % len(LEARNERS)] for k, name in enumerate(names)}


def label_end(axes: Any, x: float, y: float, text: str, color: str, *, offset: float = 0.0) -> None:
    """Label the right end of a line; `offset` (points) separates labels of lines that end close together."""
    axes.annotate(
        text, (x, y), xytext=(5, offset), textcoords="offset points", va="center", color=color, annotation_clip=False
    )


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Label the ends of lines, in the order of the lines and without overlap."""
    right = max((x for x, *_ in ends), default=0.0)
    low, high = axes.get_ylim()
    points = axes.get_window_extent().height * 72 / axes.figure.dpi / (high - low)  # per unit of y
    below = float("-inf")
    for _, y, text, color in sorted(ends, key=lambda end: end[1]):
        below = max((y - low) * points, below + LABEL_GAP)
        label_end(axes, right, y, text, color, offset=below - (y - low) * points)


def quantity(value: float, _: object = None, *, digits: int = 3) -> str:
    """Format a number, also for an axis: 1.2M, 340k, 0.5."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{unit}"
    return f"{value:.{digits}g}"
