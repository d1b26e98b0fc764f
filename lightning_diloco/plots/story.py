"""A run directory as plain series: states of the learners, commits and losses.

1. Time is in seconds since the tape's first line. Downtime of the syncer only leaves a gap.
2. Tokens, bytes and goodput come from the tape's progress notes, with interpolation between them.
3. Losses come from each process's metrics.csv, which has the step but not the time. The time is taken from the progress
   notes, which have the learner's step. If there is not exactly one file per process, the training losses of the notes
   are used instead.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.errors import ConfigError
from lightning_diloco.protocol.metric_names import TRAIN_LOSSES, VAL_LOSSES
from lightning_diloco.storage.local_runs import summary_of
from lightning_diloco.storage.tape import TAPE, read_tape

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in which a learner is in one state.

    Args:
        start_s: start, in seconds since the tape's first line.
        end_s: end, in the same unit.
        phase: "stepping", "evaluating", "joining", "draining", "stalled" or "offline".
    """

    start_s: float
    end_s: float
    phase: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of a new fragment version, with its contributors and the staleness of each."""

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
        name: learner id.
        spans: states in order, without gaps from the first join to the end.
        marks: (time, event), where event is "join", "lapse", "return" or "leave".
        steps: (time, step); a restarted process counts from its own start.
        train_loss: (time, loss).
        val_loss: (time, loss), of the anchor unless the learner was configured otherwise.
    """

    name: str
    spans: list[Span] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    steps: Points = field(default_factory=list)
    train_loss: Points = field(default_factory=list)
    val_loss: Points = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Story:
    """The series of one run.

    Args:
        lanes: lanes by learner, in the order of the ids.
        commits: commits in order.
        fleet_tokens: (time, tokens seen by all learners).
        goodput: (time, share of the planned tokens merged so far).
        bytes_up: (time, bytes received by the syncer).
        bytes_down: (time, bytes sent by the syncer).
        end_s: time of the last line.
        summary: content of summary.json; empty if there is none.
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
    """Read the story of a run, finished or still running.

    Raises:
        ConfigError: there is no tape, or no learner has joined yet.
        CorruptLogError: the tape is damaged.
    """
    path = run_dir / TAPE
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
    return Story(
        lanes=lanes,
        commits=[_commit(line) for line in lines if line["event"] == "commit"],
        **{name: _whole_run(notes, name) for name in ("fleet_tokens", "bytes_up", "bytes_down")},
        goodput=[(note["t"], note["goodput"]) for note in notes if note["goodput"] is not None],
        end_s=end_s,
        summary=summary_of(run_dir) or {},
    )


def at(points: Points, x: float) -> float:
    """Interpolate linearly at x; beyond the ends, return the value of the nearest end."""
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
    """Return a total over the run as a running maximum, because a restarted syncer starts with a lower total."""
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
                # The process before it ended with its last step, even if the syncer noticed later.
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
    """Return the time of the last note with a new step."""
    return next((b[0] for a, b in reversed(list(pairwise(steps))) if b[1] != a[1]), steps[0][0])


def _spans(changes: Sequence[tuple[float, str | None]], end_s: float) -> Iterator[Span]:
    """Yield the spans between changes; equal neighbours are merged, and a leave ends the lane."""
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
    """Return the steps of each of the learner's processes; each join starts a new process."""
    joins = [t_s for t_s, event in lane.marks if event == "join"]
    ends = [*joins[1:], float("inf")]
    return [[point for point in lane.steps if start <= point[0] < end] for start, end in zip(joins, ends, strict=True)]


def _read_losses(lane: Lane, path: Path, seconds_at: Points, left_s: float | None) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(float(row["step"]) + 1, row) for row in csv.DictReader(file) if row.get("step")]  # counted from 0
    if rows and seconds_at and left_s is not None and rows[-1][0] > seconds_at[-1][0] and left_s > seconds_at[-1][1]:
        seconds_at = [*seconds_at, (rows[-1][0], left_s)]  # the notes do not include its last steps
    for step, row in rows:
        lane.train_loss += [(at(seconds_at, step), loss) for loss in _first(row, TRAIN_LOSSES)]
        lane.val_loss += [(at(seconds_at, step), loss) for loss in _first(row, VAL_LOSSES)]


def _first(row: Mapping[str, str | None], names: Iterable[str]) -> list[float]:
    """Return the value of the first of these columns that has one, as a list; empty if none has."""
    return [float(value) for name in names if (value := row.get(name))][:1]
