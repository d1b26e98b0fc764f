"""Measures how many learners take part in each round.

python -m tests.bench.participation

1. Simulated: the real state machines with M learners of nearly equal speed, which start at random times in one period.
2. Measured: the summary of a run of the tiny recipe. --no-run skips it, --summary takes that of another run.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_diloco.config import RunConfig
from lightning_diloco.simulate.fleet import Fleet, Network, Pace
from tests.bench import report
from tests.bench.tiny import RECIPE

BOUND = 0.9
UPLOAD_STEPS = 0.4


def simulate(num_learners: int, seed: int, num_steps: int) -> dict[str, float]:
    """Simulate one fleet.

    Returns:
        Participation, and rounds per fragment and H steps.
    """
    config = RunConfig(num_fragments=24)
    fleet = Fleet(config, network=Network(upload_s=UPLOAD_STEPS, download_s=UPLOAD_STEPS), seed=seed)
    offsets = random.Random(seed)
    for k in range(num_learners):
        starts_s = 0.0 if k == 0 else offsets.uniform(0, config.sync_every)
        fleet.start(f"l{k}", Pace(step_s=1.0, jitter=0.02, starts_s=starts_s, num_steps=num_steps))
    fleet.run_to_the_end(limit_s=3.0 * num_steps + 200)
    versions = [f.version for f in fleet.syncer.state.rounds.fragments]
    periods = num_steps / config.sync_every
    return {"participation": fleet.participation, "rounds per H": sum(versions) / len(versions) / periods}


def of_recipe(num_steps: int | None) -> dict[str, Any]:
    """Return the summary of a real run of the tiny recipe with two learners."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        command = [sys.executable, "-m", "lightning_diloco.cli.main", "run", str(RECIPE), "--local", "2"]
        command += ["--run-dir", f"{folder}/run"]
        if num_steps is not None:
            command += ["--", "--trainer.max_steps", str(num_steps)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the recipe failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return dict(json.loads((Path(folder) / "run" / "summary.json").read_text()))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a fleet is below the bound."""
    parser = report.options(__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=480, help="steps of each simulated learner")
    parser.add_argument("--recipe-steps", type=int, help="steps of the real run; default: the recipe's")
    parser.add_argument("--no-run", action="store_true")
    parser.add_argument("--summary", type=Path, help="summary.json of a finished run, in place of a new one")
    args = parser.parse_args(argv)
    rows = []
    for num_learners in args.learners:
        found = [simulate(num_learners, seed, args.steps) for seed in range(args.seeds)]
        rows.append(
            {
                "run": f"simulated, M = {num_learners}",
                "participation": min(one["participation"] for one in found),
                "rounds per H": max(one["rounds per H"] for one in found),
            }
        )
    if args.summary or not args.no_run:
        summary = json.loads(args.summary.read_text()) if args.summary else of_recipe(args.recipe_steps)
        periods = max(one["step"] for one in summary["learners"]) / summary["config"]["sync_every"]
        rounds = sum(summary["versions"]) / len(summary["versions"]) / periods
        row = {"run": "tiny recipe, M = 2", "participation": summary["participation"], "rounds per H": rounds}
        rows.append(row)
    print(report.table(rows))
    print(f"\nworst of {args.seeds} seeds; participation must be at least {BOUND}")
    report.store(args.out, {"circumstances": report.circumstances(), "rows": rows})
    return int(any(row["participation"] < BOUND for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
