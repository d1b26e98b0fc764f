"""A learner next to one that is four times slower: its cost for the fast one, and whether the slow one's work counts.

python -m tests.bench.straggler

Both sleep instead of computing. The reference is the same fast learner next to an equal one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tests.bench import report
from tests.bench.processes import Measured, Sleeper, run

SLOWDOWN = 4
STALL_SHARE = 0.005
STEP_TOLERANCE = 0.05
NUM_FRAGMENTS = 4  # as in the exchange bench
WIDTH = 128


def figures(fast: Measured, summary: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the table row of one run, with the values of its fast learner."""
    wall_s = [step["wall_s"] for step in fast.steps]
    (learner,) = [found for found in summary["learners"] if found["id"] == name]
    return {
        "stall share": fast.stall_share(),
        "CPU share": fast.stall_share("hook_cpu_s"),
        "step p50 [ms]": 1e3 * statistics.median(wall_s),
        "step p95 [ms]": 1e3 * report.quantile(wall_s, 0.95),
        "landings per step": sum(len(step["landings"]) for step in fast.steps) / len(wall_s),
        "versions": statistics.mean(summary["versions"]),
        "rounds / fast periods": statistics.mean(summary["versions"])
        / (learner["step"] / summary["config"]["sync_every"]),
        "tokens merged": summary["tokens_merged"] / summary["tokens_seen"],
        "participation": summary["participation"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run both pairs; return 1 if the straggler slows down the fast learner beyond a bound."""
    parser = report.options(__doc__)
    parser.add_argument("--numel", type=int, default=64 * WIDTH**2, help="parameters, default 1M")
    parser.add_argument("--steps", type=int, default=480, help="steps of the fast learner")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    rows = []
    for name, factor in (("next to an equal", 1), (f"next to a {SLOWDOWN}x slower", SLOWDOWN)):
        fast = Sleeper(step_s=args.step_s, num_steps=args.steps, numel=args.numel, width=WIDTH)
        slow = Sleeper(step_s=factor * args.step_s, num_steps=args.steps // factor, numel=args.numel, width=WIDTH)
        found = [run([fast, slow], {"num_fragments": NUM_FRAGMENTS}) for _ in range(args.runs)]
        rows.append({"run": name, **report.median_of([figures(m[0], summary, "l0") for m, summary in found])})
    return report.conclude(args.out, rows, _checks(*rows))


def _checks(equal: dict[str, Any], straggling: dict[str, Any]) -> dict[str, bool]:
    slower = straggling["step p50 [ms]"] / equal["step p50 [ms]"] - 1
    return {
        f"stall share {straggling['stall share']:.3%} < {STALL_SHARE:.1%}": straggling["stall share"] < STALL_SHARE,
        f"its steps are {slower:+.1%} longer, at most {STEP_TOLERANCE:+.0%}": slower <= STEP_TOLERANCE,
        f"{straggling['tokens merged']:.1%} of all tokens are merged": straggling["tokens merged"] == 1.0,
        f"{straggling['rounds / fast periods']:.2f} rounds per fragment and period of the fast learner, at least 0.9": (
            straggling["rounds / fast periods"] >= 0.9
        ),
    }


if __name__ == "__main__":
    raise SystemExit(main())
