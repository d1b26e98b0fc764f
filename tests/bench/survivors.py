"""Checks that faults of a learner and kills of the syncer do not affect the step times of other learners.

python -m tests.bench.survivors --out tests/bench/results/survivors.json

1. Three learners sleep in each step. Faults of all kinds hit the third one and the syncer, never the others.
2. The step clock times every step of the others. The reference is the same run without faults, before and after.
3. The longest step may be at most 50 ms longer. It includes the machine's longest hiccup, so the machine must be idle.
   The 99.9th percentile is shown next to it.
4. In the control, learners wait for their syncer after each step. The check must fail.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_diloco.cli.faults import story as chaos_story
from lightning_diloco.cli.faults.injector import FaultInjector
from lightning_diloco.cli.faults.schedule import WITHOUT_SHARDS, draw
from tests.bench import local_run, report

SURVIVORS, VICTIM = ("l0", "l1"), "l2"
STEP_S = 0.05
FAULTS_PER_HOUR = 800  # seed 1: three of each kind within 45 s
TOLERANCE_S = 0.05


def run(seconds: float, seed: int | None, *, waits: bool = False) -> dict[str, Any]:
    """Run once and return the table row.

    Args:
        seconds: length of the run.
        seed: seed of the faults; None for no faults.
        waits: whether learners wait for the syncer.
    """
    until_s = time.time() + seconds
    chance = {"num_shards": 1, "faults_per_hour": FAULTS_PER_HOUR, "seed": seed}
    faults = iter(()) if seed is None else draw(WITHOUT_SHARDS, [VICTIM], **chance)
    with (
        tempfile.TemporaryDirectory(prefix="diloco-survivors-") as name,
        FaultInjector(faults, Path(name) / chaos_story.FAULTS) as meddler,
    ):
        run_dir = Path(name)
        options = ["--until-s", until_s, "--step-s", STEP_S, *(["--waits"] if waits else [])]
        learner = ("tests.bench.idle_learner", *options)
        ended = local_run.run(run_dir, learner, len(SURVIVORS) + 1, meddler, max_restarts=100, via=meddler.via)
        story = chaos_story.read(run_dir)
    gaps = sorted(gap for name in SURVIVORS for gap in story.learners[name].gaps())
    return {
        "faults": ", ".join(f"{kind} {n}" for kind, n in Counter(f["kind"] for f in story.faults).items()) or "none",
        "steps of the others": len(gaps),
        "p50 [ms]": 1e3 * report.quantile(gaps, 0.5),
        "p99.9 [ms]": 1e3 * report.quantile(gaps, 0.999),
        "longest [ms]": 1e3 * gaps[-1],
        "exit code": ended.exit_code,
    }


def checks_of(rows: Sequence[dict[str, Any]], control: dict[str, Any]) -> dict[str, bool]:
    """Return the checks of the runs without, with and without faults, and of the control."""
    *_, faulty = sorted(rows, key=lambda row: row["faults"] != "none")
    calm_ms, bound_ms = max(row["longest [ms]"] for row in rows if row is not faulty), 1e3 * TOLERANCE_S
    longer_ms, control_ms = faulty["longest [ms]"] - calm_ms, control["longest [ms]"] - calm_ms
    return {
        f"the longest step is {longer_ms:+.0f} ms longer, at most {bound_ms:+.0f} ms": longer_ms <= bound_ms,
        "all runs ended by themselves": not any(row["exit code"] for row in (*rows, control)),
        f"control: it is {control_ms:+.0f} ms longer where learners wait for their syncer": control_ms > bound_ms,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a check fails."""
    parser = report.options(__doc__)
    parser.add_argument("--seconds", type=float, default=65.0, help="length of each of three runs, including the start")
    parser.add_argument("--control-seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    seeds = {"without faults": None, "with faults": args.seed, "without faults again": None}
    rows = [{"run": name, **run(args.seconds, seed)} for name, seed in seeds.items()]
    control = {"run": "with faults, learners wait", **run(args.control_seconds, args.seed, waits=True)}
    return report.conclude(args.out, [*rows, control], checks_of(rows, control))


if __name__ == "__main__":
    raise SystemExit(main())
