"""Other packages beside this one: the same model, steps, period and faults, on the same machine, one after another.

python tests/bench/run.py peers [--repeats 3]          needs root and Linux (a network namespace), and an idle machine

1. Each package has a virtual environment of its own, made from the package index. One that cannot be installed is named
   with pip's reason.
2. A learner is `peer_learner.py`: 25M float32 parameters in four fragments, a period of 24 steps, steps of 0.25 s that
   sleep. Each package gets the options of its own examples. Runs of the packages alternate.
3. All numbers come from outside: the ends of steps and the landings that the parameters show from each learner's own
   clock, bytes from the counter of the namespace's loopback device, which counts each byte once.
4. "stands still" is the time per period by which steps exceed the median step. "beside a slower one" is the share of
   time that a learner loses beside one that is four times slower. After a kill -9 of the other learner, with all its
   child processes, the survivor's longest step counts, and the time until as many exchanges have landed as in a period,
   which takes 6 s if nothing is wrong.
5. The losses are those of the model that a run produces, after the same tokens and with the same inner options. Each
   package, and data parallel training, has the best of two learning rates.
6. Control: a run without any package has no landings and no bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from lightning_diloco.plots.style import LEARNERS, SETTINGS, label_ends
from tests.bench import report
from tests.bench.peer_fleet import OURS, START_S, Fleet, kill, namespace
from tests.bench.peer_learner import SYNC_EVERY

PEERS = ("torchft", "hivemind", "gradientmail")
PLAIN = "plain"
Row = dict[str, Any]
STEP_S, SLOWDOWN, LIMIT_S = 0.25, 4, 60.0
NUM_STEPS, KILL_AT = 96, 48
TEXT_STEPS, LEARNING_RATES = 600, (4e-3, 8e-3)
FIGURES = (
    "stands still [ms per period]",
    "longest step [ms]",
    "bytes per learner and period [MB]",
    "share of time lost beside a slower one",
    "longest step after kill -9 of the other [s]",
    "model exchanged again after it [s]",
)


@dataclass(frozen=True)
class Bench:
    """The environments of all packages that can be installed.

    Args:
        pythons: interpreter by package.
        refused: pip's reason, by package that cannot be installed.
    """

    pythons: Mapping[str, Path]
    refused: Mapping[str, str]

    @classmethod
    def installed(cls, folder: Path) -> Bench:
        """Install the packages in environments under a folder; environments of earlier runs are used again."""
        pythons, refused = {OURS: Path(sys.executable), PLAIN: Path(sys.executable)}, {}
        for name in PEERS:
            python = folder / name / "bin" / "python"
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
            argv = [str(python), "-m", "pip", "install", "-q", name, "-c", str(report.ROOT / ".ci" / "constraints.txt")]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                pythons[name] = python
            else:
                refused[name] = done.stderr.strip().splitlines()[-1]
        return cls(pythons, refused)

    def packages(self) -> list[str]:
        """Return the packages that can run, this one first."""
        return [OURS, *(name for name in PEERS if name in self.pythons)]

    @contextlib.contextmanager
    def fleet(self, package: str, learners: Sequence[Mapping[str, Any]]) -> Iterator[Fleet]:
        """Run learners of a package; kill all processes at the end."""
        with (
            tempfile.TemporaryDirectory(prefix="diloco-peers-", ignore_cleanup_errors=True) as name,
            Fleet(package, self.pythons[package], Path(name), learners) as fleet,
        ):
            yield fleet

    def sleeping(self, package: str) -> tuple[Row, dict[str, list[float]]]:
        """Return the figures of three runs of two learners, and the ends of steps for `draw`."""
        usual = {"task": "sleep", "step_s": STEP_S, "steps": 10**6}
        slow = {**usual, "step_s": SLOWDOWN * STEP_S}
        with self.fleet(package, [usual, usual]) as fleet:
            before = fleet.until_step(SYNC_EVERY, START_S)
            moved = fleet.until_step(NUM_STEPS, 2 * LIMIT_S) - before
            calm = fleet.clock()[SYNC_EVERY:]
        with self.fleet(package, [usual, slow]) as fleet:
            fleet.until_step(1, START_S)
            fleet.until_step(NUM_STEPS, LIMIT_S)
            beside = fleet.clock()
        with self.fleet(package, [usual, usual]) as fleet:
            fleet.until_step(KILL_AT, START_S)
            killed_s = time.time()
            kill(fleet.learners[1])
            fleet.until_step(KILL_AT + NUM_STEPS, LIMIT_S)
            after = [(at_s, landed) for at_s, landed in fleet.clock() if at_s > killed_s]
        usual_s = statistics.median(gaps(calm))
        per_period = round(sum(landed for _, landed in calm) / (len(calm) / SYNC_EVERY))
        landings = [at_s - killed_s for at_s, landed in after if landed]
        found = (
            1e3 * SYNC_EVERY * (statistics.mean(gaps(calm)) - usual_s),
            1e3 * max(gaps(calm)),
            1e-6 * moved / 2 / (len(calm) / SYNC_EVERY),
            1 - usual_s / statistics.mean(gaps(beside)),
            max(gaps(after)),
            landings[per_period - 1] if len(landings) >= per_period > 0 else float("inf"),
        )
        clocks = {
            "beside": [round(at_s - beside[0][0], 3) for at_s, _ in beside],
            "after": [round(at_s - killed_s, 3) for at_s, _ in after],
        }
        return dict(zip(FIGURES, found, strict=True)), clocks

    def version(self, package: str) -> str:
        """Return the version of an installed package."""
        code = f"from importlib.metadata import version; print(version('{package}'))"
        return subprocess.run(
            [str(self.pythons[package]), "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()

    def loss(self, package: str, lr: float) -> float:
        """Return the loss of a run's model, as the mean over its learners, which may differ with hivemind only."""
        num_learners, batches = (1, 2) if package == PLAIN else (2, 1)
        given = {"task": "text", "steps": TEXT_STEPS, "lr": lr, "seed": 1, "batches": batches}
        with self.fleet(package, [given] * num_learners) as fleet:
            return statistics.mean(fleet.losses())

    def control(self) -> tuple[int, int]:
        """Return landings and bytes of learners without any package."""
        with self.fleet(PLAIN, [{"task": "sleep", "step_s": 0.01, "steps": 10**6}] * 2) as fleet:
            before = fleet.until_step(SYNC_EVERY, START_S)
            moved = fleet.until_step(NUM_STEPS, LIMIT_S) - before
            return sum(landed for _, landed in fleet.clock()), moved


def gaps(clock: Sequence[tuple[float, bool]]) -> list[float]:
    """Return the seconds between the ends of successive steps."""
    return [after_s - before_s for (before_s, _), (after_s, _) in itertools.pairwise(clock)]


def rows_of(found: Mapping[str, Sequence[Row]], losses: Mapping[str, float]) -> list[Row]:
    """Return a row for each figure, with a column for each package: median, least and largest of the repeats."""
    parallel = losses[PLAIN]
    rows = [
        {"two learners": what, **{name: spread([one[what] for one in runs]) for name, runs in found.items()}}
        for what in FIGURES
    ]
    gap = {name: f"{losses[name]:.4f} ({losses[name] / parallel - 1:+.2%})" for name in found}
    return [*rows, {"two learners": f"loss; {parallel:.4f} by data parallel training", **gap}]


def spread(values: Sequence[float]) -> str:
    """Return median, least and largest as a text."""
    middle = statistics.median(values)
    return f"{_text(middle)} ({_text(min(values))} .. {_text(max(values))})" if math.isfinite(middle) else _text(middle)


def _text(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value + 0.0:.3g}"


def checks_of(
    found: Mapping[str, Sequence[Row]], losses: Mapping[str, float], landings: int, moved: int
) -> dict[str, bool]:
    """Return whether this package is ahead of each other in every figure, and the control."""
    middle = {
        name: {**{what: statistics.median(one[what] for one in runs) for what in FIGURES}, "loss": losses[name]}
        for name, runs in found.items()
    }
    checks = {}
    for name in list(middle)[1:]:
        behind = [what for what, value in middle[OURS].items() if value >= middle[name][what]]
        checks[f"ahead of {name} in {len(FIGURES) + 1 - len(behind)} of {len(FIGURES) + 1} rows"] = not behind
    return {**checks, f"control: without a package, {landings} landings and {moved} bytes": landings == moved == 0}


def draw(clocks: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw the steps of a learner over time: beside a slower one, and around the kill of the other.

    Args:
        clocks: by package, "beside" and "after": the ends of steps in seconds.
        path: of the picture.
    """
    end_s = NUM_STEPS * STEP_S
    titles = {"beside": "Beside a 4x slower learner", "after": "The other learner is killed at 0 s"}
    with plt.rc_context(SETTINGS):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        for axis, (panel, title) in zip(axes, titles.items(), strict=True):
            axis.set(title=title, xlabel="seconds", ylabel="steps of the learner", xlim=(0, end_s))
            ends = []
            for color, (name, clock) in zip(LEARNERS, clocks.items(), strict=False):
                seen = [at_s for at_s in clock[panel] if at_s <= end_s]
                axis.step([*seen, end_s], [*range(1, len(seen) + 1), len(seen)], where="post", color=color)
                ends.append((end_s, len(seen), name, color))
            label_ends(axis, ends)
        figure.savefig(path)
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all packages in turn; return 1 if this one is behind another, or if the control fails."""
    parser = report.options(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "peers-of-diloco")
    args = parser.parse_args(argv)
    with namespace():
        return _compare(Bench.installed(args.environments), args)


def _compare(bench: Bench, args: argparse.Namespace) -> int:
    names = bench.packages()
    kept = Kept(args.out, names)
    for k, name in itertools.product(range(args.repeats), names):
        if len(kept.found[name]) <= k:
            figures, kept.clocks[name] = bench.sleeping(name)
            kept.found[name].append(figures)
            kept.store()
            print(name, {what: round(value, 3) for what, value in figures.items()}, flush=True)
    for name, lr in itertools.product((PLAIN, *names), LEARNING_RATES):
        if str(lr) not in kept.losses[name]:
            kept.losses[name][str(lr)] = bench.loss(name, lr)
            kept.store()
    if args.out:
        draw(kept.clocks, args.out.with_suffix(".png"))
    about = {"versions": {name: bench.version(name) for name in names}, "refused": dict(bench.refused)}
    losses = {name: min(kept.losses[name].values()) for name in (PLAIN, *names)}
    rows = rows_of(kept.found, losses)
    checks = checks_of(kept.found, losses, *bench.control())
    return report.conclude(args.out, rows, checks, **kept.content(), **about)


class Kept:
    """The results so far, stored after each run; an interrupted benchmark continues from its file.

    Args:
        path: the file; None: nothing is stored.
        names: the packages.

    Attributes:
        found: figures of each repeat, by package.
        clocks: for `draw`, of the last repeat, by package.
        losses: by package and learning rate; those of data parallel training under PLAIN.
    """

    def __init__(self, path: Path | None, names: Sequence[str]) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.found: dict[str, list[Row]] = {name: known.get("found", {}).get(name, []) for name in names}
        self.clocks: dict[str, Any] = known.get("clocks", {})
        self.losses: dict[str, dict[str, float]] = {
            name: known.get("losses", {}).get(name, {}) for name in (PLAIN, *names)
        }

    def content(self) -> Row:
        """Return everything by name."""
        return {"found": self.found, "clocks": self.clocks, "losses": self.losses}

    def store(self) -> None:
        """Write the file."""
        report.store(self._path, self.content())


if __name__ == "__main__":
    raise SystemExit(main())
