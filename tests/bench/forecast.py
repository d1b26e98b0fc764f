"""The goodput that `diloco plan` expects, beside that of real runs: undisturbed, and with learners that are killed.

python -m tests.bench.forecast --out recipes/tiny/results/forecast.json

1. What a forecast is told of its run is measured, as a user who knows the machines would tell it: seconds per step,
   mean time between kills of one learner, and seconds from a kill to the process that joins again.
2. Goodput is that of `diloco chaos`, from what every learner wrote down at each step.
3. Control: a forecast that is not told of the kills must be wrong.

Source: our choice; the tolerance is that of everything else `diloco plan` predicts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.cli import chaos_story
from lightning_diloco.cli.main import main as diloco
from lightning_diloco.cli.plan import scenario_of
from lightning_diloco.hf.blueprint import blueprint
from lightning_diloco.hf.recipe import parse
from lightning_diloco.runtime.tape import read_tape
from lightning_diloco.simulate.plan import forecast
from tests.bench import report
from tests.bench.tiny import RECIPE

TOLERANCE = 0.15
NUM_LEARNERS = 2
LOOPBACK_RTT_S = 0.001
RUNS = {"nobody fails": (0.001, 1), "killed learners": (150, 5)}  # faults per hour, minutes
COMMAND = (
    f"chaos recipes/tiny/gpt.yaml --local {NUM_LEARNERS} --faults-per-hour %s --kinds kill --seed 2 --duration %sm "
    "--no-table --trainer.max_steps 20000 --trainer.val_check_interval 20000"
)

Told = dict[str, float | None]


def told_of(run_dir: Path) -> Told:
    """What a forecast has to be told of a chaos run: options of `diloco plan`."""
    story = chaos_story.read(run_dir)
    learners = story.learners.values()
    end_s = max(learner.last_s for learner in learners)
    step_s = statistics.mean(statistics.median(learner.gaps()) for learner in learners)
    if not story.faults:
        return {"step": step_s, "mtbf": None, "restart": None}
    planned_s = sum(learner.planned_s(end_s) for learner in learners)
    return {
        "step": step_s,
        "mtbf": planned_s / len(story.faults),
        "restart": statistics.mean(_restarts_s(story, run_dir)),
    }


def _restarts_s(story: chaos_story.Story, run_dir: Path) -> Iterator[float]:
    """From each kill to the next join, where the process lived to see it."""
    tape = list(read_tape(run_dir / "tape" / "events.jsonl"))
    for name in story.learners:
        joins = [(line["t"], "join") for line in tape if line["event"] == "join" and line["learner"] == name]
        moments = sorted(joins + [(fault["t"], "kill") for fault in story.faults if fault["target"] == name])
        for (before_s, was), (after_s, then) in pairwise(moments):
            if (was, then) == ("kill", "join"):
                yield after_s - before_s


def expected(told: Told) -> float:
    """The goodput that `diloco plan` expects of such a run."""
    given = {name: value for name, value in told.items() if value is not None}
    machines = {"learners": NUM_LEARNERS, "rtt": LOOPBACK_RTT_S, **given}
    return forecast(scenario_of(blueprint(parse(RECIPE)), machines)).goodput


def off_by(told: Told, measured: float) -> float:
    """How far the forecast is from what came, as a share of it."""
    return expected(told) / measured - 1


def row_of(name: str, told: Told, measured: float) -> dict[str, Any]:
    """One run as a line of figures."""
    seconds = {"step [s]": told["step"], "mean time between kills [s]": told["mtbf"], "restart [s]": told["restart"]}
    goodput = {"goodput expected": f"{expected(told):.1%}", "goodput measured": f"{measured:.1%}"}
    return {"run": name, **seconds, **goodput, "off by": f"{off_by(told, measured):+.1%}"}


def checks_of(runs: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """What has to hold."""
    checks = {
        f"{name}: off by {(gap := off_by(run['told'], run['measured'])):+.1%}, at most {TOLERANCE:.0%}": (
            abs(gap) <= TOLERANCE
        )
        for name, run in runs.items()
    }
    calm, killed = runs["nobody fails"], runs["killed learners"]
    told_nothing = {**killed["told"], "mtbf": None, "restart": None}
    cost = expected(killed["told"]) / expected(told_nothing) / (killed["measured"] / calm["measured"]) - 1
    gap = off_by(told_nothing, killed["measured"])
    return {
        **checks,
        f"what the kills alone cost: off by {cost:+.1%}, at most {TOLERANCE:.0%}": abs(cost) <= TOLERANCE,
        f"control: told of no kills, it is off by {gap:+.1%}": abs(gap) > TOLERANCE,
    }


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run, print, store; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    runs = {}
    for name, asked in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="diloco-forecast-") as folder:
            run_dir = Path(folder) / "run"
            words = (COMMAND % asked).split()
            diloco([*words[:2], "--run-dir", str(run_dir), *words[2:]])
            measured = json.loads((run_dir / "chaos.json").read_text())["goodput"]
            runs[name] = {"told": told_of(run_dir), "measured": measured}
    rows, checks = [row_of(name, **run) for name, run in runs.items()], checks_of(runs)
    say(report.table(rows))
    say("\n" + "\n".join(f"{'holds' if holds else 'FAILS'}: {sentence}" for sentence, holds in checks.items()))
    seen = {**report.circumstances(), "command": "python -m tests.bench.forecast"}
    report.store(args.out, {"circumstances": seen, "rows": rows, "checks": checks, "runs": runs})
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
