"""The goodput that `diloco plan` expects, beside that of real runs: undisturbed, and with learners that are killed.

python -m tests.bench.forecast --out recipes/tiny/results/forecast.json [--chaos RUN_DIR]

1. What a forecast is told of its run is measured, as a user who knows the machines would tell it: seconds per step
   (the median), mean time between kills of one learner, and seconds from a kill to the next step. What steps that are
   longer cost, and everything else that is no fault, it is told from the run in which nobody fails; of that run itself
   it is told nothing but the step.
2. RUN_DIR is a run of `diloco chaos --compare`, with faults of all kinds; it is told of the kills, and of the run
   without faults below it.
3. Goodput is that of `diloco chaos`, from what every learner wrote down at each step.
4. Control: a forecast that is not told of the kills must be wrong.

Source: our choice; the tolerance is that of everything else `diloco plan` predicts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.cli.faults import report as chaos_report
from lightning_diloco.cli.faults import story as chaos_story
from lightning_diloco.cli.main import main as diloco
from lightning_diloco.cli.plan import scenario_of
from lightning_diloco.hf.blueprint import blueprint
from lightning_diloco.hf.recipe import parse
from lightning_diloco.planner.plan import forecast
from tests.bench import report
from tests.bench.tiny import RECIPE

TOLERANCE = 0.15
NUM_LEARNERS = 2
LOOPBACK_RTT_S = 0.001
CALM, KILLED, CHAOS = "nobody fails", "killed learners", "all kinds of faults"
RUNS = {CALM: (0.001, 1), KILLED: (150, 5)}  # faults per hour, minutes
COMMAND = (
    f"chaos recipes/tiny/gpt.yaml --local {NUM_LEARNERS} --faults-per-hour %s --kinds kill --seed 2 --duration %sm "
    "--no-table --trainer.max_steps 20000 --trainer.val_check_interval 20000"
)

Told = dict[str, float | None]


def told_of(story: chaos_story.Story, pauses: float | None = None) -> Told:
    """What a forecast has to be told of a chaos run: options of `diloco plan`."""
    step_s = statistics.mean(statistics.median(learner.gaps()) for learner in story.learners.values())
    told = {"learners": len(story.learners), "step": step_s, "mtbf": None, "restart": None, "pauses": pauses}
    if kills := [fault for fault in story.faults if fault["kind"] == "kill"]:
        told |= {"mtbf": _planned_s(story) / len(kills), "restart": statistics.mean(_restarts_s(story))}
    return told


def pauses_of(calm: chaos_story.Story) -> float:
    """Share of the time of a run without faults that was not steps of the median length."""
    stepping_s = (x.num_steps * statistics.median(x.gaps()) for x in calm.learners.values())
    return max(0.0, 1 - sum(stepping_s) / _planned_s(calm))


def _planned_s(story: chaos_story.Story) -> float:
    end_s = max(learner.last_s for learner in story.learners.values())
    return sum(learner.planned_s(end_s) for learner in story.learners.values())


def _restarts_s(story: chaos_story.Story) -> Iterator[float]:
    """From each kill to the next step, where the new process lived to make one."""
    for learner in story.learners.values():
        starts = [(chaos_story.span(life)[0], "step") for life in learner.lives]
        kills = [
            (fault["t"], "kill") for fault in story.faults if (fault["target"], fault["kind"]) == (learner.name, "kill")
        ]
        for (before_s, was), (after_s, then) in pairwise(sorted(starts + kills)):
            if (was, then) == ("kill", "step"):
                yield after_s - before_s


def run_of(story: chaos_story.Story, pauses: float | None) -> dict[str, Any]:
    """One run: what is told of it, and its goodput."""
    return {"told": told_of(story, pauses), "measured": chaos_report.measure(story)["goodput"]}


def expected(told: Told) -> float:
    """The goodput that `diloco plan` expects of such a run."""
    given = {name: value for name, value in told.items() if value is not None}
    return forecast(scenario_of(blueprint(parse(RECIPE)), {"rtt": LOOPBACK_RTT_S, **given})).goodput


def off_by(told: Told, measured: float) -> float:
    """How far the forecast is from what came, as a share of it."""
    return expected(told) / measured - 1


def row_of(name: str, told: Told, measured: float) -> dict[str, Any]:
    """One run as a line of figures."""
    seconds = {"step [s]": told["step"], "mean time between kills [s]": told["mtbf"], "restart [s]": told["restart"]}
    others = {"learners": told["learners"], **seconds, "pauses": told["pauses"]}
    goodput = {"goodput expected": f"{expected(told):.1%}", "goodput measured": f"{measured:.1%}"}
    return {"run": name, **others, **goodput, "off by": f"{off_by(told, measured):+.1%}"}


def checks_of(runs: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """What has to hold."""
    checks = {
        f"{name}: off by {(gap := off_by(run['told'], run['measured'])):+.1%}, at most {TOLERANCE:.0%}": (
            abs(gap) <= TOLERANCE
        )
        for name, run in runs.items()
    }
    killed = runs[KILLED]
    told_nothing = {**killed["told"], "mtbf": None, "restart": None}
    gap = off_by(told_nothing, killed["measured"])
    return {
        **checks,
        f"control: told of no kills, it is off by {gap:+.1%}": abs(gap) > TOLERANCE,
    }


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run, print, store; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chaos", type=Path, metavar="RUN_DIR", help="a run of `diloco chaos --compare` that was kept")
    args = parser.parse_args(argv)
    runs: dict[str, dict[str, Any]] = {}
    pauses = None
    for name, asked in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="diloco-forecast-") as folder:
            run_dir = Path(folder) / "run"
            words = (COMMAND % asked).split()
            diloco([*words[:2], "--run-dir", str(run_dir), *words[2:]])
            story = chaos_story.read(run_dir)
        runs[name] = run_of(story, pauses)
        pauses = pauses_of(story) if name == CALM else pauses
    if args.chaos is not None:
        calm = chaos_story.read(args.chaos / "calm")
        runs[CHAOS] = run_of(chaos_story.read(args.chaos), pauses_of(calm))
    rows, checks = [row_of(name, **run) for name, run in runs.items()], checks_of(runs)
    say(report.table(rows))
    say("\n" + report.verdicts(checks))
    seen = {**report.circumstances(), "command": "python -m tests.bench.forecast"}
    report.store(args.out, {"circumstances": seen, "rows": rows, "checks": checks, "runs": runs})
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
