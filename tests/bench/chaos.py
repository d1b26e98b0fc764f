"""The tiny recipe under 85 faults per hour: lost work, recovery time, and effect on the loss.

python -m tests.bench.chaos --out recipes/tiny/results/chaos.json

1. The run is COMMAND, an ordinary `diloco chaos` command, and ends without intervention.
2. Faults are counted from the log of applied faults, not from the schedule.
3. Recovery is the time from a fault, or from its end, to a commit that names the target. The bound is on the median,
   because another fault can prolong the worst recovery.
4. The loss is compared with a run without faults that merged as many tokens, with the same learning-rate schedule.
5. Learners that reach `max_steps` end too early. A machine that is fast enough for that needs a larger value.

Source: our choice. The best published step efficiency under failures is 85 %.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_diloco.cli.faults import story as chaos_story
from lightning_diloco.cli.faults.schedule import WITHOUT_SHARDS
from lightning_diloco.cli.main import main as diloco
from tests.bench import report

FAULTS_PER_HOUR, MINUTES, SEED = 85, 20, 1
START_UP_MINUTES = 1  # the command's duration includes the start of its processes
COMMAND = (
    f"chaos recipes/tiny/gpt.yaml --local 4 --faults-per-hour {FAULTS_PER_HOUR} --seed {SEED} "
    f"--duration {MINUTES + START_UP_MINUTES}m --compare --no-table "
    "--trainer.max_steps 12000 --trainer.val_check_interval 2400"
)
STEP_EFFICIENCY, PARTICIPATION, EXCESS, RECOVERY_S = 0.95, 0.90, 0.01, 30.0


def loss_before_the_drain(run_dir: Path, eval_loss: float | None) -> float:
    """Return the median over learners of the anchor's loss at the end of training, before the last contributions.

    Args:
        run_dir: run directory of the recipe, which logs to CSV files.
        eval_loss: loss of the final anchor, which the last learner logs afterwards.
    """
    last = []
    for folder in sorted((run_dir / "learners").glob("*/lightning_logs")):
        found = [row for path in folder.glob("version_*/metrics.csv") for row in csv.DictReader(path.open())]
        validations = [(int(row["step"]), float(row["val/loss"])) for row in found if row.get("val/loss")]
        last.append(max(pair for pair in validations if pair[1] != eval_loss)[1])
    return statistics.median(last)


def trained_minutes(run_dir: Path) -> float:
    """Return the minutes from the first step of any learner to the last."""
    learners = chaos_story.read(run_dir).learners.values()
    return (max(one.last_s for one in learners) - min(one.first_s for one in learners)) / 60


def rows_of(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table."""
    recovered = {kind: times for kind in WITHOUT_SHARDS if (times := recoveries_s(found, kind))}
    figures = {
        "minutes from the first step to the last": f"{found['trained_minutes']:.1f}",
        "faults applied": ", ".join(f"{kind} {found['num_faults_by_kind'].get(kind, 0)}" for kind in WITHOUT_SHARDS),
        "step efficiency": f"{found['step_efficiency']:.1%}",
        "availability": f"{found['availability']:.1%}",
        "goodput": f"{found['goodput']:.1%}",
        "participation": f"{found['participation']:.1%}",
        "contributing again after, median": _each(recovered, statistics.median),
        "contributing again after, at the latest": _each(recovered, max),
        "never again": str(sum(line["recovery_s"] is None for line in found["recoveries"])),
        "longest gap between steps": f"{max(found['longest_gap_s'].values()):.2f} s",
        "median step": f"{max(found['median_step_s'].values()):.2f} s",
        "inner steps": str(found["num_steps"]),
        "loss of the final anchor": _loss(found.get("eval_loss")),
        "the same without faults": _loss(found.get("eval_loss_calm")),
        "loss before the last contributions": f"{found['before_drain']:.4f}",
        "the same without faults ": f"{found['before_drain_calm']:.4f}",
    }
    return [{"run": name, "tiny, 4 learners": value} for name, value in figures.items()]


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def recoveries_s(found: dict[str, Any], kind: str) -> list[float]:
    """Return the recovery times of the faults of this kind that ended before the run did."""
    times = (line["recovery_s"] for line in found["recoveries"] if line["kind"] == kind)
    return [time_s for time_s in times if time_s is not None]


def _each(recovered: dict[str, list[float]], figure: Callable[[list[float]], float]) -> str:
    return ", ".join(f"{kind} {figure(times):.1f} s" for kind, times in recovered.items())


def checks_of(found: dict[str, Any]) -> dict[str, bool]:
    """Return the checks."""
    counts = [found["num_faults_by_kind"].get(kind, 0) for kind in WITHOUT_SHARDS]
    excess = found.get("eval_loss_excess")
    said = "not comparable" if excess is None else f"{excess:+.2%}"
    killed_s = statistics.median(recoveries_s(found, "kill") or [math.inf])
    return {
        "the run ended by itself, its ledger is exact, and it replays": (
            found["exit_code"] == 0 and found["ledger_exact"] and found["replayed"] == "merges"
        ),
        f"{sum(counts)} faults were applied, {min(counts)} to {max(counts)} of each kind": (
            max(counts) - min(counts) <= 1 + found["num_faults_skipped"]
        ),
        f"learners trained for {found['trained_minutes']:.1f} minutes, at least {MINUTES}": (
            found["trained_minutes"] >= MINUTES
        ),
        f"step efficiency {found['step_efficiency']:.1%}, at least {STEP_EFFICIENCY:.0%}": (
            found["step_efficiency"] >= STEP_EFFICIENCY
        ),
        f"participation {found['participation']:.1%}, at least {PARTICIPATION:.0%}": (
            found["participation"] >= PARTICIPATION
        ),
        f"a killed learner contributes again after {killed_s:.1f} s (median), at most {RECOVERY_S:.0f} s": (
            killed_s <= RECOVERY_S
        ),
        f"loss at equal merged tokens {said}, at most {EXCESS:+.0%}": excess is not None and excess <= EXCESS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--run-dir", type=Path, help="run directory of a finished run; default: run COMMAND now")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="diloco-chaos-") as folder:
        run_dir = args.run_dir or Path(folder) / "run"
        if args.run_dir is None:
            words = COMMAND.split()
            diloco([*words[:2], "--run-dir", str(run_dir), *words[2:]])
        found = json.loads((run_dir / "chaos.json").read_text())
        found["trained_minutes"] = trained_minutes(run_dir)
        found["before_drain"] = loss_before_the_drain(run_dir, found["eval_loss"])
        found["before_drain_calm"] = loss_before_the_drain(run_dir / "calm", found.get("eval_loss_calm"))
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run_dir / "chaos.png", args.out.with_suffix(".png"))
    return report.conclude(args.out, rows_of(found), checks_of(found), command=f"diloco {COMMAND}", report=found)


if __name__ == "__main__":
    raise SystemExit(main())
