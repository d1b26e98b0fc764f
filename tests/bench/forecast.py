"""Compares the goodput that `diloco plan` expects with that of real runs, with and without killed learners.

python -m tests.bench.forecast --out recipes/tiny/results/forecast.json [--chaos RUN_DIR]

1. The forecast takes measured values, as a user who knows the machines would pass them: the median step time, the mean
   time between kills of one learner, and the time from a kill to the next step. The time lost without faults, to longer
   steps and the like, comes from the run without faults. The forecast of that run itself takes only the step time.
2. RUN_DIR is a run of `diloco chaos --compare` with faults of all kinds. Its forecast takes the rate of its kills, and
   the time lost in its run without faults.
3. Goodput is defined as in `diloco chaos` and computed from the step clocks of all learners.
4. The control is a forecast without kills, which must be wrong.

Source: our choice. The tolerance is the same for everything that `diloco plan` predicts.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
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
    """Return the values of a forecast that describe a chaos run."""
    step_s = statistics.mean(statistics.median(learner.gaps()) for learner in story.learners.values())
    told = {"num_learners": len(story.learners), "step_s": step_s, "mtbf_s": None, "restart_s": None, "pauses": pauses}
    if kills := [fault for fault in story.faults if fault["kind"] == "kill"]:
        told |= {"mtbf_s": _planned_s(story) / len(kills), "restart_s": statistics.mean(restarts_s(story))}
    return told


def pauses_of(calm: chaos_story.Story) -> float:
    """Return the share of time in a run without faults that was not spent in steps of median length."""
    stepping_s = (x.num_steps * statistics.median(x.gaps()) for x in calm.learners.values())
    return max(0.0, 1 - sum(stepping_s) / _planned_s(calm))


def _planned_s(story: chaos_story.Story) -> float:
    end_s = max(learner.last_s for learner in story.learners.values())
    return sum(learner.planned_s(end_s) for learner in story.learners.values())


def restarts_s(story: chaos_story.Story) -> Iterator[float]:
    """Yield the time from each kill to the next step, if the new process made one."""
    for learner in story.learners.values():
        starts = [(chaos_story.span(life)[0], "step") for life in learner.lives]
        kills = [
            (fault["t"], "kill") for fault in story.faults if (fault["target"], fault["kind"]) == (learner.name, "kill")
        ]
        for (before_s, was), (after_s, then) in pairwise(sorted(starts + kills)):
            if (was, then) == ("kill", "step"):
                yield after_s - before_s


def run_of(story: chaos_story.Story, pauses: float | None) -> dict[str, Any]:
    """Return the forecast's inputs for one run, and its measured goodput."""
    return {"told": told_of(story, pauses), "measured": chaos_report.measure(story)["goodput"]}


def expected(told: Told) -> float:
    """Return the goodput that `diloco plan` expects of such a run."""
    return forecast(scenario_of(blueprint(parse(RECIPE)), {"rtt_s": LOOPBACK_RTT_S, **told})).goodput


def off_by(told: Told, measured: float) -> float:
    """Return the relative error of the forecast."""
    return expected(told) / measured - 1


def row_of(name: str, told: Told, measured: float) -> dict[str, Any]:
    """Return the table row of one run."""
    described = {
        "learners": told["num_learners"],
        "step [s]": told["step_s"],
        "mean time between kills [s]": told["mtbf_s"],
        "restart [s]": told["restart_s"],
        "pauses": told["pauses"],
    }
    goodput = {"goodput expected": f"{expected(told):.1%}", "goodput measured": f"{measured:.1%}"}
    return {"run": name, **described, **goodput, "off by": f"{off_by(told, measured):+.1%}"}


def checks_of(runs: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return the checks."""
    checks = {
        f"{name}: off by {(gap := off_by(run['told'], run['measured'])):+.1%}, at most {TOLERANCE:.0%}": (
            abs(gap) <= TOLERANCE
        )
        for name, run in runs.items()
    }
    killed = runs[KILLED]
    told_nothing = {**killed["told"], "mtbf_s": None, "restart_s": None}
    gap = off_by(told_nothing, killed["measured"])
    return {
        **checks,
        f"control: told of no kills, it is off by {gap:+.1%}": abs(gap) > TOLERANCE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--chaos", type=Path, metavar="RUN_DIR", help="run directory of `diloco chaos --compare`")
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
    rows = [row_of(name, **run) for name, run in runs.items()]
    return report.conclude(args.out, rows, checks_of(runs), command="python -m tests.bench.forecast", runs=runs)


if __name__ == "__main__":
    raise SystemExit(main())
