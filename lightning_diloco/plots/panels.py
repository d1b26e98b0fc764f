"""The panels of the plots; each function draws one panel onto the given axes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from lightning_diloco.plots.story import Lane, Points, Story, at
from lightning_diloco.plots.style import ANCHOR, FAINT, INK, PHASES, color_of, label_ends, quantity

LINE = "#0072B2"

_LANE = 0.28
_NUM_BINS = 60
_FAR = 8.0  # a cap line above this multiple of the traffic would flatten the curves
# In points: the gap next to a mark, the width of a character, and the margin right of the axes.
_MARK_GAP, _CHARACTER, _MARGIN = 12.0, 4.0, 36.0


def timeline(axes: Any, story: Story) -> None:
    """Draw a lane per learner with its states and merged contributions, and all commits below."""
    colors = color_of(story.lanes)
    for y, lane in enumerate(story.lanes.values()):
        _lane(axes, lane, y, colors[lane.name])
        merged = [commit.t_s for commit in story.commits if lane.name in commit.learners]
        axes.vlines(merged, y - _LANE, y - _LANE + 0.13, color="white", lw=0.6)
    y = len(story.lanes)
    axes.vlines([commit.t_s for commit in story.commits], y - _LANE * 0.6, y + _LANE * 0.6, color=INK, lw=0.4)
    axes.set_yticks(range(y + 1), [*story.lanes, "commits"])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set(ylim=(y + 0.6, -0.75), xlim=(0, story.end_s * 1.01), xlabel="seconds")
    for row, lane in enumerate(story.lanes.values()):
        _mark_texts(axes, lane, row, colors[lane.name])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_title("The fleet")
    keys = "full: stepping; pale: evaluating or joining; hatched: offline; notches: merged work"
    axes.set_title(keys, loc="right", fontsize=8, fontweight="normal", color=FAINT)


def _lane(axes: Any, lane: Lane, y: int, color: str) -> None:
    for span in lane.spans:
        width_s = span.end_s - span.start_s
        box = {"y": y, "width": width_s, "left": span.start_s, "height": 2 * _LANE}
        if span.phase == "offline":
            axes.barh(**box, color="white", edgecolor="#B0B0B0", hatch="////", lw=0)
        else:
            axes.barh(**box, color=color, alpha=PHASES.get(span.phase, 0.25), lw=0)
    for t_s, _ in lane.marks[1:]:
        axes.plot(t_s, y - _LANE - 0.12, marker="v", ms=3.5, color=color, clip_on=False)


def _mark_texts(axes: Any, lane: Lane, y: int, color: str) -> None:
    """Label a lane's marks; marks that are close together share a label."""
    points = axes.get_window_extent().width * 72 / axes.figure.dpi / axes.get_xlim()[1]  # per second
    shared: list[tuple[float, float, str]] = []  # first and last mark, in seconds, and the text
    for t_s, event in lane.marks[1:]:
        text = "joins again" if event == "join" else event + "s"
        if shared and (t_s - shared[-1][1]) * points < _MARK_GAP + _CHARACTER * len(shared[-1][2]):
            first_s, _, before = shared.pop()
            shared.append((first_s, t_s, f"{before}, {text}"))
        else:
            shared.append((t_s, t_s, text))
    for first_s, last_s, text in shared:
        over = (last_s - axes.get_xlim()[1]) * points + _CHARACTER * len(text)
        x, side, offset = (last_s, "left", 5) if over < _MARGIN else (first_s, "right", -5)
        axes.annotate(text, (x, y - _LANE - 0.12), xytext=(offset, 0), textcoords="offset points", ha=side,
                      va="center", fontsize=7, color=color)  # fmt: skip


def loss(axes: Any, story: Story, *, over: str, names: bool = True) -> None:
    """Draw each learner's training loss and the anchor's validation loss over "tokens", "seconds" or "bytes"."""
    across = _across(story, over)
    colors, ends = color_of(story.lanes), list[tuple[float, float, str, str]]()
    for lane in story.lanes.values():
        if lane.train_loss:
            xs, ys = [across(t_s) for t_s, _ in lane.train_loss], [y for _, y in lane.train_loss]
            axes.plot(xs, ys, color=colors[lane.name], lw=0.8, alpha=0.75)
            ends.append((xs[-1], ys[-1], f"{lane.name}, training", colors[lane.name]))
    validated = sorted(point for lane in story.lanes.values() for point in lane.val_loss)
    if validated:
        xs, ys = [across(t_s) for t_s, _ in validated], [y for _, y in validated]
        axes.plot(xs, ys, color=ANCHOR, marker="o", ms=3, lw=1.2)
        ends.append((xs[-1], ys[-1], "anchor, validation", ANCHOR))
    axes.margins(y=0.12)
    if names:
        label_ends(axes, ends)
    axes.set(xlabel={"tokens": "tokens of the fleet", "seconds": "seconds", "bytes": "bytes up and down"}[over])
    axes.xaxis.set_major_formatter(lambda value, _: quantity(value) + ("B" if over == "bytes" and value else ""))
    axes.set_xlim(left=0)


def _across(story: Story, over: str) -> Callable[[float], float]:
    if over == "seconds":
        return lambda t_s: t_s
    if over == "tokens":
        return lambda t_s: at(story.fleet_tokens, t_s)
    return lambda t_s: at(story.bytes_up, t_s) + at(story.bytes_down, t_s)


def goodput(axes: Any, story: Story) -> None:
    """Draw the goodput so far, and the participation: each commit's contributors per stepping learner."""
    shares = [(c.t_s, len(c.learners) / max(1, c.num_stepping)) for c in story.commits]
    smooth = _binned(shares, story.end_s)
    axes.plot(*_columns(smooth), color=FAINT, lw=1.0, drawstyle="steps-mid")
    axes.plot(*_columns(story.goodput), color=LINE)
    ends = [(smooth[-1], "participation", FAINT)] if smooth else []
    ends += [(story.goodput[-1], "goodput so far", LINE)] if story.goodput else []
    axes.set(ylim=(0, 1.05), xlim=(0, story.end_s * 1.01), xlabel="seconds")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    label_ends(axes, [(x, y, text, color) for (x, y), text, color in ends])
    axes.set_title("Goodput and participation")


def _binned(points: Points, end_s: float) -> Points:
    """Return means over equal intervals of time, without empty intervals."""
    width_s = max(end_s, 1e-9) / _NUM_BINS
    bins: dict[int, list[float]] = {}
    for t_s, y in points:
        bins.setdefault(int(t_s / width_s), []).append(y)
    return [((k + 0.5) * width_s, sum(ys) / len(ys)) for k, ys in sorted(bins.items())]


def versions(axes: Any, story: Story) -> None:
    """Draw each fragment's version over time; equally frequent exchanges give parallel steps."""
    from matplotlib import colormaps

    stairs: dict[int, Points] = {}
    for commit in story.commits:
        stairs.setdefault(commit.fragment, [(0.0, 0)]).append((commit.t_s, commit.version))
    colors = colormaps["viridis"]
    for k, p in enumerate(sorted(stairs)):
        color = colors(0.9 * k / max(1, len(stairs) - 1))
        xs, ys = _columns([*stairs[p], (story.end_s, stairs[p][-1][1])])
        axes.step(xs, ys, where="post", color=color, lw=0.9)
    if stairs:
        first, last = min(stairs), max(stairs)
        axes.annotate(f"fragments {first} (dark) to {last} (light)", (0.01, 0.95), xycoords="axes fraction",
                      va="top", color=FAINT)  # fmt: skip
    axes.set(xlim=(0, story.end_s * 1.01), xlabel="seconds", ylabel="version")
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title("Versions of the fragments")


def bandwidth(axes: Any, story: Story, *, cap_bps: float | None = None) -> None:
    """Draw the syncer's bits per second in each direction, and the cap if it is known."""
    ends = []
    for points, name, color in ((story.bytes_up, "up", LINE), (story.bytes_down, "down", "#D55E00")):
        rates = _rates(points)
        if rates:
            axes.step(*_columns(rates), where="mid", color=color)
            ends.append((*rates[-1], name, color))
    if cap_bps is not None:
        both = [*_rates(story.bytes_up), *_rates(story.bytes_down)]
        _cap(axes, cap_bps, max((rate for _, rate in both), default=0.0))
    axes.set(xlim=(0, story.end_s * 1.01), xlabel="seconds", ylabel="bit/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(quantity)
    label_ends(axes, ends)
    axes.set_title("Traffic at the syncer, each way")


def _cap(axes: Any, cap_bps: float, most_bps: float) -> None:
    """Draw the cap as a line, or as text if a line would flatten the curves."""
    said = f"cap {quantity(cap_bps)}bit/s"
    if cap_bps > _FAR * most_bps:
        axes.set_ylim(top=1.3 * most_bps if most_bps else 1.0)
        axes.annotate(f"{said}, far above: at most {100 * most_bps / cap_bps:.2g} % of it is used", (0.01, 0.97),
                      xycoords="axes fraction", va="top", color=FAINT)  # fmt: skip
        return
    axes.set_ylim(top=1.2 * max(cap_bps, axes.get_ylim()[1]))
    axes.axhline(cap_bps, color=INK, lw=1.0, ls=(0, (4, 3)))
    axes.annotate(said, (0.01, cap_bps), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points", color=INK)  # fmt: skip


def _rates(points: Points) -> Points:
    """Return bits per second over intervals that contain a few points each."""
    num_bins = max(1, min(_NUM_BINS, len(points) // 2))
    width_s = points[-1][0] / num_bins if points else 0.0
    if width_s <= 0:
        return []
    edges = [k * width_s for k in range(num_bins + 1)]
    return [((a + b) / 2, 8 * (at(points, b) - at(points, a)) / width_s) for a, b in pairwise(edges)]


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
