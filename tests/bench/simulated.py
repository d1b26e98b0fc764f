"""Compares `diloco simulate` with real runs: rounds, participation, goodput, and recovery from kills.

python tests/bench/run.py simulated

1. Three learners sleep in each step. In one scenario learners are killed (SIGKILL) at random times, in one a learner is
   four times slower, and in one each link is slower than the exchanges need. Each scenario runs three times.
2. The simulation gets means, not distributions: the mean and the spread of each learner's steps, the times between
   kills, the times from a kill to the next step, and the rate of the links. Everything else follows from the state
   machines. Simulations take as long as a run; the figures are means of twenty. Rounds are counted as the difference
   between a simulation of twice the time and one of the time, so the drain does not count.
3. Participation and recovery are those of `diloco chaos`. Rounds are counted between the first and the last step of the
   fleet. Goodput: tokens merged, of those that all learners would have trained in this time. Links have a delay, except
   in the runs with kills.
4. A simulated figure must be within 5 % of the median of the real runs, or between the lowest and the highest of them.
5. The controls are simulations without kills, without a slow learner and with full links. They must miss a bound.

Source: bounds are our choice.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_diloco.cli.faults import report as chaos_report
from lightning_diloco.cli.faults import story as chaos_story
from lightning_diloco.cli.faults.injector import FaultInjector
from lightning_diloco.cli.faults.schedule import Fault, draw
from lightning_diloco.config import RunConfig
from lightning_diloco.core.quantize import wire_nbytes
from lightning_diloco.simulate.chips import Chips
from lightning_diloco.simulate.goodput import Scenario, simulate
from lightning_diloco.simulate.settings import Network
from tests.bench import local_run, report
from tests.bench.forecast import restarts_s

TOLERANCE, REPEATS, SIMULATIONS = 0.05, 3, 20
STEP_S, NUM_MATRICES, WIDTH, START_S = 0.1, 96, 256, 15.0
LEARNERS = ("l0", "l1", "l2")
CONFIG = RunConfig(sync_every=24, num_fragments=4)  # of idle_learner.py
KILLS_PER_HOUR = 360.0
LATENCY_S = 0.005
KILLED, SLOW, CAPPED = "killed learners", "a learner that is four times slower", "links that are too slow"
METRICS = ("rounds per second", "participation", "goodput", "recovery [s]")
COLUMNS = ("run", *(f"{name}, {which}" for name in METRICS for which in ("measured", "simulated")))
Row = dict[str, Any]


def fragment_bytes() -> int:
    """Return the size of a contribution to one fragment."""
    return wire_nbytes(NUM_MATRICES * WIDTH**2 // CONFIG.fragments_wanted, CONFIG.wire, CONFIG.block_size)


def rate_bps() -> float:
    """Return the rate of slow links, which would need 1.5 times as much in each direction."""
    return 8 * fragment_bytes() * CONFIG.fragments_wanted / (CONFIG.sync_every * STEP_S) / 1.5


def faults(name: str, seed: int) -> Iterator[Fault]:
    """Yield the faults of a run: kills without end, or slow links."""
    if name == KILLED:
        return draw(("kill",), LEARNERS, num_shards=1, faults_per_hour=KILLS_PER_HOUR, seed=seed)
    rate = rate_bps() if name == CAPPED else None
    slow = {"at_s": 0.0, "lasts_s": 1e9, "delay_s": LATENCY_S, "rate_bps": rate}
    return (Fault(number=k, kind="slow", target=learner, **slow) for k, learner in enumerate(LEARNERS, 1))


def real(name: str, seed: int, run_s: float) -> Row:
    """Run a scenario for real; return the measurements, and the inputs of a simulation."""
    until_s = time.time() + START_S + run_s
    model = ("--step-s", STEP_S, "--matrices", NUM_MATRICES, "--dense", WIDTH)
    learner = ["tests.bench.idle_learner", "--until-s", until_s, *model]
    with tempfile.TemporaryDirectory(prefix="diloco-simulated-") as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        with FaultInjector(faults(name, seed), run_dir / chaos_story.FAULTS) as injector:
            slow = ["--slow", LEARNERS[-1]] if name == SLOW else []
            options = {"via": injector.via, "max_restarts": 200}
            ended = local_run.run(run_dir, [*learner, *slow], len(LEARNERS), injector, **options)
        assert ended.exit_code == 0, f"{name}: {ended}"
        story = chaos_story.read(run_dir)
    learners = [story.learners[learner] for learner in LEARNERS]
    first_s, last_s = min(x.first_s for x in learners), max(x.last_s for x in learners)
    found = chaos_report.measure(story)
    recoveries = [each["recovery_s"] for each in found["recoveries"] if each["recovery_s"] is not None]
    gaps = [x.gaps() for x in learners]
    steps_s = [statistics.mean(each) for each in gaps]
    summary = story.summary or {}
    merged = summary["tokens_merged"] / CONFIG.fragments_wanted / (chaos_report.tokens_per_step(summary) or 1.0)
    kills = found["num_faults_by_kind"].get("kill", 0)
    return {
        "rounds per second": sum(first_s <= c.t <= last_s for c in story.commits) / (last_s - first_s),
        "participation": found["participation"],
        "goodput": merged / sum((last_s - first_s) / step_s for step_s in steps_s),
        "recovery [s]": statistics.median(recoveries) if recoveries else None,
        "steps_s": steps_s,
        "jitter": statistics.median(report.quantile(each, 0.9) / statistics.median(each) - 1 for each in gaps),
        "mtbf_s": len(LEARNERS) * (last_s - first_s) / kills if kills else None,
        "rejoin_s": statistics.mean(restarts_s(story)) if kills else 0.0,
        "rate_bps": rate_bps() if name == CAPPED else None,
    }


def simulated(runs: Sequence[Row], duration_s: float) -> Row:
    """Return the mean figures of SIMULATIONS simulations with the means of these runs as inputs."""
    kills = [run["mtbf_s"] for run in runs if run["mtbf_s"]]
    transfer_s = 8 * fragment_bytes() / runs[0]["rate_bps"] if runs[0]["rate_bps"] else 0.02
    scenario = Scenario(
        num_learners=len(LEARNERS),
        chips=Chips(count=1, slice_chips=1, mtbi_s=1e15),
        step_s=[statistics.mean(steps) for steps in zip(*(run["steps_s"] for run in runs), strict=True)],
        jitter=statistics.mean(run["jitter"] for run in runs),
        mtbf_s=statistics.mean(kills) if kills else None,
        rejoin_s=statistics.mean(run["rejoin_s"] for run in runs),
        duration_s=duration_s,
        network=Network(latency_s=LATENCY_S, upload_s=transfer_s, download_s=transfer_s),
        merge_s=0.01,
        config=CONFIG,
    )
    seeds = [replace(scenario, seed=seed) for seed in range(SIMULATIONS)]
    found, longer = [simulate(each) for each in seeds], [simulate(replace(x, duration_s=2 * duration_s)) for x in seeds]
    recoveries = [each.recovery_s for each in found if each.recovery_s is not None]
    return {
        "rounds per second": statistics.mean(b.rounds - a.rounds for a, b in zip(found, longer, strict=True))
        / duration_s,
        "participation": statistics.mean(each.participation or 0.0 for each in found),
        "goodput": statistics.mean(each.goodput for each in found),
        "recovery [s]": statistics.mean(recoveries) if recoveries else None,
    }


def misses(row: Row, runs: Sequence[Row]) -> list[str]:
    """Return the figures that are neither near the median of the real runs nor among them."""
    found = []
    for metric in METRICS:
        real_ones, value = [run[metric] for run in runs if run[metric] is not None], row[metric]
        if real_ones and value is not None:
            middle = statistics.median(real_ones)
            if abs(value / middle - 1) > TOLERANCE and not min(real_ones) <= value <= max(real_ones):
                found.append(f"{metric} {value:.3g} instead of {middle:.3g}")
    return found


def compared(runs: dict[str, list[Row]], duration_s: float) -> tuple[list[Row], dict[str, bool]]:
    """Simulate what was measured; return the rows of the table, and the checks."""
    rows, checks = [], {}
    for name, found in runs.items():
        row = simulated(found, duration_s)
        measured = {x: statistics.median(run[x] for run in found) for x in METRICS if found[0][x] is not None}
        assert all(row[metric] is not None for metric in measured), f"{name}: {measured}, simulated: {row}"
        pairs = {
            f"{x}, {which}": one.get(x) for x in METRICS for which, one in (("measured", measured), ("simulated", row))
        }
        rows.append({"run": name, **pairs})
        missed = misses(row, found)
        what = f"but for {', '.join(missed)}" if missed else "all figures"
        checks[f"{name}: {what} within {TOLERANCE:.0%} or the spread"] = not missed
        told_nothing = {"mtbf_s": None, "rate_bps": None, "steps_s": [STEP_S] * len(LEARNERS)}
        control = misses(simulated([run | told_nothing for run in found], duration_s), found)
        checks[f"control: not told of {name}: {', '.join(control)}"] = bool(control)
    return rows, checks


def spreads(rows: Sequence[Row], runs: dict[str, list[Row]]) -> list[Row]:
    """Return for each figure the lowest and highest real run, and how far the simulation is from the median."""
    found: list[Row] = []
    for row, metric in itertools.product(rows, METRICS):
        real_ones = [run[metric] for run in runs[row["run"]] if run[metric] is not None]
        if real_ones:
            off = row[f"{metric}, simulated"] / statistics.median(real_ones) - 1
            cells = {"lowest": min(real_ones), "highest": max(real_ones), "simulated against the median": f"{off:+.1%}"}
            found.append({"run": f"{row['run']}: {metric}", **cells})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run, simulate, print and store; return 1 if a bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--run-s", type=float, default=60.0, help="duration of a run, without its start")
    args = parser.parse_args(argv)
    runs: dict[str, list[Row]] = {name: [] for name in (KILLED, SLOW, CAPPED)}
    for seed, name in itertools.product(range(1, args.repeats + 1), runs):
        runs[name].append(real(name, seed, args.run_s))
        print(name, runs[name][-1], flush=True)
    rows, checks = compared(runs, args.run_s)
    return report.conclude(args.out, rows, checks, columns=COLUMNS, runs=runs)


if __name__ == "__main__":
    raise SystemExit(main())
