"""Draws the picture of the round trip in CONTRIBUTING.md from a trace of the protocol's state machines.

python -m tests.bench.round_trip

1. Two learners of unequal speed and a syncer run in the simulator (`simulate/fleet.py`), which drives the state
   machines of `protocol/` on the schedule of `core/schedule.py`. Their actions are recorded.
2. The picture's file contains the trace. A test compares it with the current behavior of the state machines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.config import RunConfig
from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.plots.style import FAINT, GRID, INK, LEARNERS, SETTINGS
from lightning_diloco.protocol import actions as do
from lightning_diloco.protocol import messages
from lightning_diloco.simulate.fleet import Fleet
from lightning_diloco.simulate.learner import SimulatedLearner
from lightning_diloco.simulate.settings import Network, Pace
from lightning_diloco.simulate.syncer import SimulatedSyncer

PICTURE = Path(__file__).parent / "results" / "how_it_works.svg"
SYNC_EVERY, NUM_FRAGMENTS, OVERLAP = 12, 4, 2
PERIOD = 2  # of l0, counted from 0; an arbitrary choice
STEP_S = {"l0": 1.0, "l1": 1.3}
LATENCY_S = 0.08

Moment = tuple[float, str, str, int]  # time in steps of l0 since the period began; party; event; fragment or step


class _WatchedSyncer(SimulatedSyncer):
    def __init__(self, *around: Any, note: Callable[[str, str, int], None], **options: Any) -> None:
        super().__init__(*around, **options)
        self._note = note

    def _do(self, action: do.SyncerAction) -> None:
        match action:
            case do.Send(message=messages.Announce(fragment=p)):
                self._note("syncer", "announcement", p)
            case do.Merge(fragment=p):
                self._note("syncer", "merge", p)
            case do.Send(message=messages.Commit(fragment=p)):
                self._note("syncer", "offer", p)
        super()._do(action)


class _Watched(Fleet):
    """Records the actions of the state machines and their times."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moments: list[Moment] = []

    def _made_syncer(self, **options: Any) -> _WatchedSyncer:
        return _WatchedSyncer(self, self.config, self._timeline, self.random, note=self._note, **options)

    def _note(self, whose: str, what: str, number: int) -> None:
        self.moments.append((self.now_s, whose, what, number))

    def _step(self, learner: SimulatedLearner) -> None:
        super()._step(learner)
        if learner.state is not None:
            self._note(learner.name, "step", learner.state.step)

    def _do_for_learner(self, learner: SimulatedLearner, action: do.LearnerAction) -> None:
        match action:
            case do.Say(messages.Intent(fragment=p)):
                self._note(learner.name, "intent", p)
            case do.Snapshot(messages.Ready(fragment=p)):
                self._note(learner.name, "snapshot", p)
            case do.Upload(messages.Ready(fragment=p)):
                self._note(learner.name, "upload", p)
            case do.Fetch(fragment=p):
                self._note(learner.name, "download", p)
            case do.Land(fragment=p):
                self._note(learner.name, "landing", p)
        super()._do_for_learner(learner, action)

    def _upload_arrives(self, learner: SimulatedLearner, ready: messages.Ready, boot: int) -> None:
        self._note(learner.name, "uploaded", ready.fragment)
        super()._upload_arrives(learner, ready, boot)

    def _fetched(self, learner: SimulatedLearner, action: do.Fetch, found: Any, boot: int) -> None:
        self._note(learner.name, "downloaded", action.fragment)
        super()._fetched(learner, action, found, boot)


def trace() -> list[Moment]:
    """Return the events of one period, until its last fragment has landed."""
    config = RunConfig(sync_every=SYNC_EVERY, num_fragments=NUM_FRAGMENTS, overlap=OVERLAP)
    network = Network(latency_s=LATENCY_S, upload_s=0.8, download_s=0.5)
    fleet = _Watched(config, network=network, merge_s=0.12, expect=len(STEP_S))
    for name, step_s in STEP_S.items():
        fleet.start(name, Pace(step_s=step_s))
    fleet.run_until((PERIOD + 3) * SYNC_EVERY * STEP_S["l0"])
    (begin_s,) = (moment[0] for moment in fleet.moments if moment[1:] == ("l0", "step", PERIOD * SYNC_EVERY))
    shown = ((round(t - begin_s, 2), who, what, number) for t, who, what, number in fleet.moments)
    return [moment for moment in dict.fromkeys(shown) if 0 <= moment[0] <= SYNC_EVERY + 2 * OVERLAP]


def stored() -> list[Moment]:
    """Return the trace that the picture was drawn from."""
    (said,) = re.findall(r"<dc:description>(.*?)</dc:description>", PICTURE.read_text())
    return [(t, who, what, number) for t, who, what, number in json.loads(said.replace("&quot;", '"'))]


class Trip:
    """The events of one fragment, from its intent to its last landing."""

    def __init__(self, moments: list[Moment], fragment: int) -> None:
        own = [m for m in moments if m[2] != "step" and m[3] == fragment]
        begins, self.opener = next((t, who) for t, who, what, _ in own if what == "intent")
        self._moments = [m for m in own if m[0] >= begins]

    def at(self, whose: str, what: str) -> float:
        """Return the time of the first such event."""
        return next(t for t, who, which, _ in self._moments if (who, which) == (whose, what))


def draw(moments: list[Moment]) -> Any:
    """Draw the schedule of a period above, and one fragment's round trip below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 3.4))
    _schedule(above, moments)
    _round_trip(below, moments, 0)
    return figure


def _schedule(axes: Any, moments: list[Moment]) -> None:
    for p in range(NUM_FRAGMENTS):
        trip = Trip(moments, p)
        for k, name in enumerate(STEP_S):
            start, end = trip.at(name, "snapshot"), trip.at(name, "landing")
            axes.barh(p + 0.2 * (2 * k - 1), end - start, left=start, height=0.34, color=LEARNERS[k], lw=0)
    for step in range(1, SYNC_EVERY + 1):
        fragment = fragment_due(step, sync_every=SYNC_EVERY, num_fragments=NUM_FRAGMENTS)
        if fragment is not None:
            axes.plot(step, fragment, marker="|", ms=26, mew=1.5, color=INK)
    axes.set_yticks(range(NUM_FRAGMENTS), [f"fragment {p}" for p in range(NUM_FRAGMENTS)])
    axes.set(ylim=(NUM_FRAGMENTS - 0.4, -0.6), xlim=(0, SYNC_EVERY + 2 * OVERLAP))
    axes.set_xticks(range(0, SYNC_EVERY + 2 * OVERLAP + 1, 2))
    axes.grid(axis="y", visible=False)
    axes.set_title(f"Each fragment travels once in H = {SYNC_EVERY} steps; both learners train on")
    axes.set_xlabel("steps of l0 ( | due;  bars: on its way, of l0 and of l1)")


_LANES = {"l0": (0, 1), "syncer": (2, 2), "l1": (4, 3)}  # rows of its training and of its link


def _round_trip(axes: Any, moments: list[Moment], p: int) -> None:
    trip = Trip(moments, p)
    begin, end = trip.at("l0", "intent") - 0.45, max(trip.at(name, "landing") for name in STEP_S) + 0.75
    for k, name in enumerate(STEP_S):
        _learner(axes, moments, trip, name, LEARNERS[k])
    opened, merges, offers = (trip.at("syncer", what) for what in ("announcement", "merge", "offer"))
    _bar(axes, (opened, merges), 2, "round is open", GRID, ink=INK)
    _bar(axes, (merges, offers), 2, "", INK)
    axes.text(offers + 0.08, 2, "merged, logged, offered", va="center", ha="left")
    axes.set_yticks(range(5), ["l0 trains", "its link", "syncer", "its link", "l1 trains"])
    axes.set(ylim=(4.75, -0.75), xlim=(begin, end))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel("steps of l0")
    axes.set_title(f"The round trip of fragment {p}")


def _learner(axes: Any, moments: list[Moment], trip: Trip, name: str, color: str) -> None:
    trains, link = _LANES[name]
    inwards = 0.33 if link > trains else -0.33
    ends = [t for t, who, what, _ in moments if (who, what) == (name, "step")]
    for start, end in pairwise(ends):
        axes.barh(trains, end - start - 0.05, left=start + 0.025, height=0.5, color=color, alpha=0.25, lw=0)
    for what, label in (("snapshot", "copy"), ("landing", "land")):
        t = trip.at(name, what)
        axes.plot([t, t], [trains - 0.25, trains + 0.25], color=color, lw=4)
        axes.text(t, trains - inwards * 1.25, label, ha="center", va="center", color=color, fontweight="bold")
    _bar(axes, (trip.at(name, "upload"), trip.at(name, "uploaded")), link, "upload", color)
    _bar(axes, (trip.at(name, "download"), trip.at(name, "downloaded")), link, "new", color)
    opens = trip.at("syncer", "announcement")
    if name == trip.opener:
        _arrow(axes, (trip.at(name, "intent"), trains + inwards), (opens, 2 - inwards), "due soon")
    else:
        _arrow(axes, (opens, 2 - inwards), (opens + LATENCY_S, trains + inwards), "announced")
    _arrow(axes, (trip.at("syncer", "offer"), 2 - inwards), (trip.at(name, "download"), link + inwards * 0.7), "")


def _bar(axes: Any, span: tuple[float, float], y: float, label: str, color: str, *, ink: str = "white") -> None:
    start, end = span
    axes.barh(y, end - start, left=start, height=0.5, color=color, lw=0)
    axes.text((start + end) / 2, y, label, ha="center", va="center", color=ink)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], label: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": FAINT, "lw": 1.2, "shrinkA": 0})
    axes.text(end[0] + 0.08, (start[1] + end[1]) / 2, label, ha="left", va="center", color=FAINT)


def main() -> None:
    """Draw the picture again."""
    from matplotlib import rc_context

    moments = trace()
    with rc_context({**SETTINGS, "font.size": 11, "axes.titlesize": 11.5}):
        PICTURE.parent.mkdir(exist_ok=True)
        draw(moments).savefig(PICTURE, metadata={"Date": None, "Description": json.dumps(moments)})


if __name__ == "__main__":
    main()
