"""What the strategy costs a learner of several ranks: its steps with and without it, for the same inner strategy.

python -m tests.bench.ranks_step

Two ranks with gloo whose compute sleeps. Runs alternate, so that both meet the same machine. The control has one more
collective in every step, which waits for all ranks: the same check must fail there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench import report

ROOT = Path(__file__).parents[2]
SHARE = 0.97
LIMIT_S = 300.0
MODES = {"without": ("--plain",), "with": (), "control": ("--blocks",)}


def mean_step_s(mode: str, inner: str, args: argparse.Namespace) -> float:
    """One run: everything that its steps took, by their number, exchanges included."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        sizes = ("--numel", args.numel, "--steps", args.steps, "--warm-up", args.warm_up, "--step-s", args.step_s)
        words = ("--inner", inner, *MODES[mode], *sizes, "--root", name)
        _run([sys.executable, "-m", "tests.bench.ranks_trainer", *map(str, words)], Path(name) / "out")
        return statistics.mean(json.loads((Path(name) / "steps_s.json").read_text()))


def _run(command: Sequence[str], out: Path) -> None:
    """To its end, and none of its processes any further."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
    env = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with out.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        if process.wait(timeout=LIMIT_S) != 0:
            raise RuntimeError(f"a learner failed:\n{out.read_text()[-4000:]}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def figures(inner: str, steps_s: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over all runs of each mode, and what part of its speed is left."""
    middle = {mode: statistics.median(found) for mode, found in steps_s.items()}
    return {
        "run": inner,
        **{f"{mode} [ms]": 1e3 * found for mode, found in middle.items()},
        "speed left": middle["without"] / middle["with"],
        "speed left, control": middle["without"] / middle["control"],
    }


def checks_of(row: dict[str, Any]) -> dict[str, bool]:
    """The bound, and that it can be missed."""
    left, control = row["speed left"], row["speed left, control"]
    return {
        f"{row['run']}: {left:.3f} of its speed is left, at least {SHARE}": left >= SHARE,
        f"{row['run']}: a collective that blocks leaves {control:.3f}, less than {SHARE}": control < SHARE,
    }


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run all modes in turn; 1 if a bound is missed, or the control does not miss it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 * 128**2, help="parameters, default 1M")
    parser.add_argument("--steps", type=int, default=240, help="timed ones")
    parser.add_argument("--warm-up", type=int, default=24)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--inner", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for inner in args.inner:
        steps_s: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(args.runs):
            for mode, found in steps_s.items():
                found.append(mean_step_s(mode, inner, args))
        rows.append(figures(inner, steps_s))
    checks = {sentence: holds for row in rows for sentence, holds in checks_of(row).items()}
    say(report.table(rows))
    say("\n" + report.verdicts(checks))
    report.store(args.out, {"circumstances": report.circumstances(), "rows": rows, "checks": checks})
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
