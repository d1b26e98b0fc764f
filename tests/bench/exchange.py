"""Cost of an exchange: time on the training thread, and bytes at the socket.

python -m tests.bench.exchange

The run has a model of 25M parameters in 4 fragments, two learners that sleep 50 ms per step instead of computing, and a
syncer. Two controls must fail the same checks: float32 on the wire, and a link that works on the training thread.

The stall of an exchange is its time on the training thread. It includes its part of the hooks that snapshot and land,
and the copies that remain when the optimizer is about to change parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench import report
from tests.bench.processes import Measured, Sleeper, run

STALL_S = 0.010
BYTES_SHARE = 0.26
NUM_FRAGMENTS = 4


@dataclass(frozen=True, slots=True)
class Check:
    """An upper bound on a column."""

    figure: str
    bound: float

    def holds(self, row: dict[str, Any]) -> bool:
        return bool(row[self.figure] <= self.bound)


CHECKS = {
    "stall": Check("stall p95 [ms]", 1e3 * STALL_S),
    "bytes up": Check("up / float32", BYTES_SHARE),
    "bytes down": Check("down / float32", BYTES_SHARE),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A run and the checks that it must fail."""

    name: str
    wire: str = "int8"
    blocks: bool = False
    must_fail: frozenset[str] = frozenset()


CASES = (
    Case("int8"),
    Case("control: wire=fp32", wire="fp32", must_fail=frozenset({"bytes up", "bytes down"})),
    Case("control: a link that blocks", blocks=True, must_fail=frozenset({"stall"})),
)


def figures(measured: Sequence[Measured], numel: int) -> dict[str, Any]:
    """Return the table row of one run."""
    stalls, worked = (
        [1e3 * stall for learner in measured for stall in learner.exchange_s(clock)]
        for clock in ("hook_s", "hook_cpu_s")
    )
    fragment_bytes = 4 * numel / NUM_FRAGMENTS
    return {
        "exchanges": len(stalls),
        "stall p50 [ms]": report.quantile(stalls, 0.5),
        "stall p95 [ms]": report.quantile(stalls, 0.95),
        "stall max [ms]": max(stalls),
        "CPU p95 [ms]": report.quantile(worked, 0.95),
        "up / float32": max(m.bytes_up / m.num_snapshots for m in measured) / fragment_bytes,
        "down / float32": max(m.bytes_down / m.num_landings for m in measured) / fragment_bytes,
    }


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians over a case's runs, and whether the checks have the expected results."""
    sleeper = Sleeper(step_s=args.step_s, num_steps=args.steps, numel=args.numel, blocks=case.blocks)
    options = {"sync_every": args.sync_every, "num_fragments": NUM_FRAGMENTS, "wire": case.wire}
    rows = [figures(run([sleeper, sleeper], options)[0], args.numel) for _ in range(args.runs)]
    middle = report.median_of(rows)
    failed = {name for name, check in CHECKS.items() if not check.holds(middle)}
    return {
        "run": case.name,
        **middle,
        "fails": ", ".join(sorted(failed)) or "nothing",
        "as it must": "yes" if is_right(case, failed) else "NO",
    }


def is_right(case: Case, failed: set[str]) -> bool:
    """Whether a control fails at least its own checks, and another case fails none."""
    return case.must_fail <= failed if case.must_fail else not failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; return 1 if one has an unexpected result."""
    parser = report.options(__doc__)
    parser.add_argument("--numel", type=int, default=96 * 512**2, help="parameters, default 25M")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--sync-every", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    rows = [measure(case, args) for case in CASES]
    print(report.table(rows))
    bounds = ", ".join(f"{check.figure} <= {check.bound:g}" for check in CHECKS.values())
    print(f"\n{args.numel / 1e6:.1f}M parameters, {args.step_s * 1e3:.0f} ms a step; checks: {bounds}")
    report.store(args.out, {"circumstances": report.circumstances(), "rows": rows})
    return int(any(row["as it must"] == "NO" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
