"""Learners in four regions, scaled down: checks that no learner waits for the network, and that all tokens are merged.

python -m tests.bench.wide_area   # 11 minutes

1. The ratio of traffic to compute is that of a 12B decoder at the paper's settings (H = P = 24, overlap 2, int8, steps
   of 2 s). Model and links are smaller by the same factor, steps are half as long. Round trips of 40 ms are not scaled
   down, so they weigh twice as much.
2. Learners sleep instead of computing. Bytes are real: they travel over TLS and through a proxy for each learner, which
   delays and limits each direction.
3. utilization: share of a learner's time outside of the link's hooks, measured around them. merged: tokens merged, of
   the tokens seen. exchanges per step: fragments that landed in a step, after the first H + 2 steps and without the
   drain; 1 is the schedule.
4. With 1.25 Gbit/s, contributions need more than the link has. The run must miss the schedule and nothing else.
   Control: learners that send on the training thread must miss the bound on utilization.
5. Data parallel training, by arithmetic: an all-reduce of bfloat16 gradients in each step, without overlap.

Source: bounds are our choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lightning_diloco.config import RunConfig
from lightning_diloco.core.quantize import wire_nbytes
from lightning_diloco.plots.style import SETTINGS, color_of, quantity
from tests.bench import report
from tests.bench.processes import Measured, Sleeper, run

LEARNERS, RTT_S, SYNC_EVERY = 4, 0.04, 24
REAL_NUMEL, REAL_STEP_S = 12e9, 2.0
RATES_GBPS = (5.0, 2.5, 1.25)  # the last one is too slow
# Published for a 10B model, steps of 0.8 s and H = 100 (Streaming DiLoCo, arXiv 2501.18512): Gbit/s by utilization.
PUBLISHED = {
    "data parallel, 10B (published)": {0.5: 104.8, 0.8: 222.0, 0.9: 222.0, 0.95: 268.0, 0.99: 472.0},
    "Streaming DiLoCo, 10B (published)": {0.5: 0.4, 0.8: 0.9, 0.9: 1.4, 0.95: 1.4, 0.99: 1.7},
}
UTILIZATION, MERGED, ON_SCHEDULE = 0.99, 1.0, 0.9
COLUMNS = ("run", "needs of the link", "utilization", "step p95 [ms]", "merged", "take part", "exchanges per step",
           "data parallel")  # fmt: skip
BLOCKED = "control: sends on the training thread, 5 Gbit/s"


def rate_bps(gbps: float, numel: int, step_s: float) -> float:
    """Return the scaled-down rate: the same share of a step per fragment."""
    return gbps * 1e9 * (numel / REAL_NUMEL) / (step_s / REAL_STEP_S)


def load(gbps: float) -> float:
    """Return the share of the link that contributions need, in one direction."""
    config = RunConfig()
    nbytes = wire_nbytes(round(REAL_NUMEL / SYNC_EVERY / 256) * 256, config.wire, config.block_size)
    return 8 * nbytes / (gbps * 1e9) / REAL_STEP_S


def data_parallel(gbps: float) -> float:
    """Return the utilization of data parallel training over the same links (rule 5)."""
    all_reduce_s = 16 * REAL_NUMEL * 2 * (LEARNERS - 1) / LEARNERS / (gbps * 1e9)
    return REAL_STEP_S / (REAL_STEP_S + all_reduce_s)


def figures(name: str, gbps: float, crew: Sequence[Measured], summary: dict[str, Any]) -> dict[str, Any]:
    """Return the table row of one run."""
    landings = [len(step["landings"]) for learner in crew for step in learner.steps[SYNC_EVERY + 2 :]]
    walls = [step["wall_s"] for learner in crew for step in learner.steps]
    return {
        "run": name,
        "needs of the link": load(gbps),
        "utilization": min(1 - learner.stall_share() for learner in crew),
        "step p95 [ms]": 1e3 * report.quantile(walls, 0.95),
        "merged": summary["tokens_merged"] / summary["tokens_seen"],
        "take part": summary["participation"],
        "exchanges per step": statistics.mean(landings),
        "data parallel": data_parallel(gbps),
        "clipped": sum(learner["num_clipped"] for learner in summary["learners"]),
        "discarded": summary["tokens_discarded"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print and store the table; return 1 if a bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--numel", type=int, default=24 * 512**2, help="parameters, default 6.3M")
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--step-s", type=float, default=1.0)
    args = parser.parse_args(argv)
    rows = []
    for name, gbps, blocks in (
        *((f"{gbps:g} Gbit/s", gbps, False) for gbps in RATES_GBPS),
        (BLOCKED, RATES_GBPS[0], True),
    ):
        sleeper = Sleeper(step_s=args.step_s, num_steps=args.steps, numel=args.numel, blocks=blocks)
        rate = rate_bps(gbps, args.numel, args.step_s)
        crew, summary = run([sleeper] * LEARNERS, {"sync_every": SYNC_EVERY}, delay_s=RTT_S / 2, rate_bps=rate)
        rows.append(figures(name, gbps, crew, summary))
    if args.out:
        draw(rows, args.out.with_suffix(".png"))
    return report.conclude(args.out, rows, _checks(rows), columns=COLUMNS)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw utilization over the rate of each link: measured, published, and by arithmetic (rule 5)."""
    measured = sorted((float(row["run"].split()[0]), row["utilization"]) for row in rows[:-1])
    rates = [10 ** (exponent / 20) for exponent in range(61)]
    lines = {
        "this package, 12B scaled down (measured)": measured,
        "data parallel, 12B (arithmetic)": [(gbps, data_parallel(gbps)) for gbps in rates],
        **{name: [(gbps, share) for share, gbps in found.items()] for name, found in PUBLISHED.items()},
    }
    with rc_context(SETTINGS):
        figure = Figure(figsize=(7.5, 3.6), layout="constrained")
        axes: Any = figure.subplots()
        for label, color in color_of(lines).items():
            style = "-" if "arithmetic" in label else "o-"
            axes.plot(*zip(*lines[label], strict=True), style, color=color, markersize=3.5, label=label)
        axes.set(xscale="log", ylim=(0, 1.03), xlabel="Gbit/s of each link", title="Compute utilization and bandwidth")
        axes.xaxis.set_major_formatter(quantity)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc=(0.24, 0.5), fontsize=8)
        figure.savefig(path)


def _checks(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    *plain, blocked = rows
    checks = {}
    for row in plain:
        name, landed, is_enough = row["run"], row["exchanges per step"], row["needs of the link"] < 1
        checks[f"{name}: utilization {row['utilization']:.2%}, bound 99%"] = row["utilization"] >= UTILIZATION
        checks[f"{name}: {row['merged']:.1%} of the tokens are merged, bound 100%"] = row["merged"] >= MERGED
        bound = f"bound {ON_SCHEDULE:g}" if is_enough else f"the link is too slow for {ON_SCHEDULE:g}"
        checks[f"{name}: {landed:.2f} exchanges per step, {bound}"] = (landed >= ON_SCHEDULE) == is_enough
    utilization = blocked["utilization"]
    checks[f"{blocked['run']}: utilization {utilization:.1%}, below 99%"] = utilization < UTILIZATION
    return checks


if __name__ == "__main__":
    raise SystemExit(main())
