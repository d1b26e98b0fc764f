"""Reads the records of a chaos run: step clocks, faults, commits and leaves.

Steps come from the learners' step clocks, faults from the fault log, commits and leaves from the tape. A script has no
step clock, so its learners are missing here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.cli.faults.step_log import PATTERN, read_steps
from lightning_diloco.storage.files import whole_lines
from lightning_diloco.storage.local_runs import summary_of
from lightning_diloco.storage.tape import TAPE, read_tape
from lightning_diloco.syncer.shards.layout import num_shards_of

Json = dict[str, Any]
Span = tuple[float, float]

FAULTS = Path("chaos") / "faults.jsonl"


@dataclass(frozen=True, slots=True)
class Learner:
    """The record of one learner.

    Args:
        name: learner id.
        lives: end times of the steps of each process, in order; NaN marks a validation between two steps.
        stops: intervals in which it was stopped.
        left_s: time of its leave after it finished; None if it did not leave.
    """

    name: str
    lives: tuple[Sequence[float], ...]
    stops: tuple[Span, ...]
    left_s: float | None

    @property
    def num_steps(self) -> int:
        return sum(not math.isnan(t) for life in self.lives for t in life)

    @property
    def first_s(self) -> float:
        return span(self.lives[0])[0]

    @property
    def last_s(self) -> float:
        return max(span(life)[1] for life in self.lives)

    def gaps(self) -> list[float]:
        """Return times between consecutive steps of one process, without stops and validation."""
        pairs = (pair for life in self.lives for pair in pairwise(life) if not math.isnan(sum(pair)))
        return [max(0.0, stop - start - self._stopped_s(start, stop)) for start, stop in pairs]

    def stepping_s(self) -> float:
        """Return the time in which a process of this learner made steps."""
        return sum(stop - start - self._stopped_s(start, stop) for start, stop in map(span, self.lives))

    def planned_s(self, end_s: float) -> float:
        """Return the time in which it should have made steps; end_s is the end of the run."""
        return (end_s if self.left_s is None else self.left_s) - self.first_s

    def _stopped_s(self, start: float, stop: float) -> float:
        return sum(max(0.0, min(stop, b) - max(start, a)) for a, b in self.stops)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: unix seconds, ids of the contributors, and the fragment."""

    t: float
    learners: Sequence[str]
    fragment: int


@dataclass(frozen=True, slots=True)
class Story:
    """All records in a run directory.

    Args:
        learners: learners that made a step, by id.
        faults: the "begin" lines of faults.jsonl, each with `until_s`.
        num_skipped: number of faults that had no target.
        commits: in order.
        num_shards: number of shards, including the syncer.
        summary: summary.json; None if there is none.
    """

    learners: Mapping[str, Learner]
    faults: Sequence[Json]
    num_skipped: int
    commits: Sequence[Commit]
    num_shards: int
    summary: Json | None


def read(run_dir: Path) -> Story:
    """Read the records of a run."""
    tape = list(read_tape(run_dir / TAPE))
    lines = [json.loads(line) for line in whole_lines(run_dir / FAULTS)] if (run_dir / FAULTS).exists() else []
    ends = {line["number"]: line["t"] for line in lines if line["what"] == "end"}
    faults = [{**line, "until_s": ends.get(line["number"], line["t"])} for line in lines if line["what"] == "begin"]
    left = {line["learner"]: line["t"] for line in tape if line["event"] == "leave" and line["reason"] == "finished"}
    learners = {}
    for folder in sorted((run_dir / "learners").glob("*/")):
        stops = tuple((f["t"], f["until_s"]) for f in faults if (f["target"], f["kind"]) == (folder.name, "stop"))
        if lives := _lives(folder.glob(PATTERN)):
            learners[folder.name] = Learner(folder.name, lives, stops, left.get(folder.name))
    return Story(
        learners=learners,
        faults=faults,
        num_skipped=sum(line["what"] == "skip" for line in lines),
        commits=[Commit(x["t"], x["learners"], x["fragment"]) for x in tape if x["event"] == "commit"],
        num_shards=num_shards_of(run_dir),
        summary=summary_of(run_dir),
    )


def _lives(files: Iterable[Path]) -> tuple[Sequence[float], ...]:
    lives = [times for times in map(read_steps, files) if not all(map(math.isnan, times))]
    return tuple(sorted(lives, key=span))


def span(times: Sequence[float]) -> Span:
    """Return the times of the first and last step of a process."""
    steps = [t for t in times if not math.isnan(t)]
    return steps[0], steps[-1]
