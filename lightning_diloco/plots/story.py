"""What a run directory tells, as plain series: who took part when, what was committed, and how the losses fell.

1. Time is seconds since the tape's first line; a syncer that was down leaves a hole, nothing else.
2. Tokens, bytes and goodput at a time come from the tape's progress notes; between two of them they are interpolated.
3. A loss comes from a process's metrics.csv, which knows the step but not the time: its time is that at which the notes
   saw the learner at that step. Where there is not one such file for each process, the losses of the notes stand in.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.errors import ConfigError
from lightning_diloco.runtime.tape import read_tape

Points = list[tuple[float, float]]

TRAIN_LOSS = ("train/loss", "train_loss", "train_loss_step", "loss")
VAL_LOSS = ("val/loss", "val_loss", "eval/loss")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in one state.

    Args:
        start_s: since the tape's first line.
        end_s: likewise.
        phase: "stepping", "evaluating", "joining", "draining", "stalled" or "offline".
    """

    start_s: float
    end_s: float
    phase: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A fragment's new version: when, which, from whom, and how many versions behind each was."""

    t_s: float
    fragment: int
    version: int
    learners: tuple[str, ...]
    staleness: tuple[int, ...]
    num_stepping: int
    round_s: float


@dataclass(slots=True)
class Lane:
    """One learner.

    Args:
        name: its id.
        spans: its states, in order, without holes from the first join to the end.
        marks: (time, event): "join", "lapse", "return", "leave".
        steps: (time, step); a process that starts again counts from its own start.
        train_loss: (time, loss).
        val_loss: (time, loss), of the anchor unless the learner was told otherwise.
    """

    name: str
    spans: list[Span] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    steps: Points = field(default_factory=list)
    train_loss: Points = field(default_factory=list)
    val_loss: Points = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Story:
    """A run.

    Args:
        lanes: by learner, in the order of their ids.
        commits: in order.
        fleet_tokens: (time, tokens seen by all learners).
        goodput: (time, share of the planned tokens that was merged so far).
        bytes_up: (time, bytes received by the syncer).
        bytes_down: (time, bytes sent by it).
        end_s: time of the last line.
        summary: summary.json; empty if there is none.
    """

    lanes: Mapping[str, Lane]
    commits: Sequence[Commit]
    fleet_tokens: Points
    goodput: Points
    bytes_up: Points
    bytes_down: Points
    end_s: float
    summary: Mapping[str, Any]


def read(run_dir: Path) -> Story:
    """Collect what a run left behind; also of one that still goes on.

    Raises:
        ConfigError: there is no tape, or nothing happened yet.
        CorruptLogError: the tape is damaged.
    """
    path = run_dir / "tape" / "events.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: a run directory has a tape; give the RUN_DIR that `diloco run` printed"
        )
    lines = list(read_tape(path))
    if not any(line["event"] == "join" for line in lines):
        raise ConfigError(f"{path} has {len(lines)} lines and no join yet: nothing to draw; wait for the first learner")
    start, end_s = lines[0]["t"], lines[-1]["t"] - lines[0]["t"]
    lines = [{**line, "t": line["t"] - start} for line in lines]
    notes = [line for line in lines if line["event"] == "progress"]
    lanes = {name: _lane(name, lines, notes, end_s) for name in _names(lines)}
    for lane in lanes.values():
        _add_losses(lane, run_dir / "learners" / lane.name, notes)
    summary = run_dir / "summary.json"
    return Story(
        lanes=lanes,
        commits=[_commit(line) for line in lines if line["event"] == "commit"],
        **{name: _whole_run(notes, name) for name in ("fleet_tokens", "bytes_up", "bytes_down")},
        goodput=[(note["t"], note["goodput"]) for note in notes if note["goodput"] is not None],
        end_s=end_s,
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
    )


def at(points: Points, x: float) -> float:
    """The value at x on the line through the points; beyond its ends, that of the end."""
    if not points:
        return 0.0
    k = bisect_left(points, (x, float("-inf")))
    if k in (0, len(points)):
        return points[min(k, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[k - 1], points[k]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1


def _names(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({line["learner"] for line in lines if line["event"] == "join"}, key=lambda name: (len(name), name))


def _commit(line: Mapping[str, Any]) -> Commit:
    return Commit(
        t_s=line["t"],
        fragment=line["fragment"],
        version=line["version"],
        learners=tuple(line["learners"]),
        staleness=tuple(line["staleness"]),
        num_stepping=line["num_stepping"],
        round_s=line["round_s"],
    )


def _whole_run(notes: Sequence[Mapping[str, Any]], name: str) -> Points:
    """A total over the run; a syncer that starts again knows a little less at first."""
    return list(zip((note["t"] for note in notes), accumulate((note[name] for note in notes), max), strict=True))


def _lane(name: str, lines: Sequence[Mapping[str, Any]], notes: Sequence[Mapping[str, Any]], end_s: float) -> Lane:
    lane = Lane(name)
    changes: list[tuple[float, str | None]] = []
    for line in lines:
        event = line["event"]
        if event in ("join", "lapse", "return", "leave") and line["learner"] == name:
            lane.marks.append((line["t"], event))
            if event == "lapse":
                changes.append((line["t"] - line["silent_s"], "offline"))
            if event == "join" and lane.steps:
                # What went before it ended with its last step, whatever the syncer still believed of it.
                died_s = _last_advance(lane.steps)
                changes = [*(change for change in changes if change[0] <= died_s), (died_s, "offline")]
            changes.append((line["t"], {"lapse": "offline", "leave": None}.get(event, "stepping")))
        elif event == "progress":
            told = next((learner for learner in line["learners"] if learner["id"] == name), None)
            if told is None or not changes or changes[-1][1] is None:
                continue
            lane.steps.append((line["t"], told["step"]))
            changes.append((line["t"], "offline" if told["phase"] == "lapsed" else told["phase"]))
    lane.spans = list(_spans(sorted(changes, key=lambda change: change[0]), end_s))
    return lane


def _last_advance(steps: Points) -> float:
    """When the notes last saw a new step."""
    return next((b[0] for a, b in reversed(list(pairwise(steps))) if b[1] != a[1]), steps[0][0])


def _spans(changes: Sequence[tuple[float, str | None]], end_s: float) -> Iterator[Span]:
    """Neighbours in the same state become one; a leave ends the lane."""
    start_s, phase = 0.0, None
    for t_s, now in [*changes, (end_s, None)]:
        if now == phase:
            continue
        if phase is not None and t_s > start_s:
            yield Span(start_s, t_s, phase)
        start_s, phase = t_s, now


def _add_losses(lane: Lane, folder: Path, notes: Sequence[Mapping[str, Any]]) -> None:
    files = sorted(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    processes = _processes(lane)
    if len(files) == len(processes):
        for path, steps in zip(files, processes, strict=True):
            left_s = next((t_s for t_s, event in lane.marks if event == "leave" and steps is processes[-1]), None)
            _read_losses(lane, path, [(step, t_s) for t_s, step in steps], left_s)
        lane.train_loss.sort()
        lane.val_loss.sort()
    if not lane.train_loss:
        told = ((note["t"], learner) for note in notes for learner in note["learners"] if learner["id"] == lane.name)
        lane.train_loss = [(t_s, learner["loss"]) for t_s, learner in told if learner["loss"] is not None]


def _processes(lane: Lane) -> list[Points]:
    """The steps of each process of the learner: a join begins a new one, which counts from its own start."""
    joins = [t_s for t_s, event in lane.marks if event == "join"]
    ends = [*joins[1:], float("inf")]
    return [[point for point in lane.steps if start <= point[0] < end] for start, end in zip(joins, ends, strict=True)]


def _read_losses(lane: Lane, path: Path, seconds_at: Points, left_s: float | None) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(float(row["step"]) + 1, row) for row in csv.DictReader(file) if row.get("step")]  # counted from 0
    if rows and seconds_at and left_s is not None and rows[-1][0] > seconds_at[-1][0] and left_s > seconds_at[-1][1]:
        seconds_at = [*seconds_at, (rows[-1][0], left_s)]  # no note saw its last steps
    for step, row in rows:
        lane.train_loss += [(at(seconds_at, step), loss) for loss in _first(row, TRAIN_LOSS)]
        lane.val_loss += [(at(seconds_at, step), loss) for loss in _first(row, VAL_LOSS)]


def _first(row: Mapping[str, str | None], names: Iterable[str]) -> list[float]:
    """The first of these columns that has a value in this row; none if none has."""
    return [float(value) for name in names if (value := row.get(name))][:1]
