"""Cost of the strategy for a learner of several ranks: step times with and without it, for the same inner strategy.

python -m tests.bench.ranks_step

A learner has two gloo ranks that sleep instead of computing. Learners with and without the strategy take turns of some
seconds, and each turn is compared with its neighbours (turns.py). Each learner is launched several times, because two
launches of the same program differ permanently by up to 1.5 % of a step, which is half of the allowed slowdown. The
control has an additional blocking collective in every step, and must fail the same check.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import report, turns

SHARE = 0.97
LANDINGS = 0.9 * 4 / 24  # 90 % of num_fragments / sync_every
WARM_UP = 30  # steps, more than a period
MODES = {"without": ("--plain",), "with": (), "control": ("--blocks",)}


def measure(inner: str, args: argparse.Namespace) -> dict[str, Any]:
    """Launch the learners of all modes several times and return their table row."""
    launches = [launch(inner, args) for _ in range(args.launches)]
    steps_s = {mode: [mean_s for steps_s, _ in launches for mean_s in steps_s[mode]] for mode in MODES}
    return figures(inner, steps_s, statistics.mean(landings for _, landings in launches))


def launch(inner: str, args: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """Launch one learner per mode; return the mean step time in each turn of each mode, and landings per step."""
    common = ("-m", "tests.bench.ranks_trainer", "--inner", inner, "--numel", args.numel, "--step-s", args.step_s)
    programs = {mode: (sys.executable, *map(str, common), *options) for mode, options in MODES.items()}
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(report.ROOT)}
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        turns.playing(programs, Path(name), env=env, warm_up=WARM_UP) as players,
    ):
        turns.take_turns(players.values(), rounds=args.rounds, turn_s=args.turn_s)
        steps_s = {mode: [*map(statistics.mean, player.steps_by_turn())] for mode, player in players.items()}
        return steps_s, players["with"].landings_per_step


def figures(inner: str, steps_s: Mapping[str, Sequence[float]], landings: float) -> dict[str, Any]:
    """Return the medians over rounds of the step time and of the relative speed.

    Args:
        inner: inner strategy.
        steps_s: mean step time in seconds, including exchanges, in each turn of each mode.
        landings: landings per step with the strategy.
    """

    def left(mode: str) -> float:
        return statistics.median(plain / ours for plain, ours in zip(steps_s["without"], steps_s[mode], strict=True))

    return {
        "run": inner,
        **{f"{mode} [ms]": 1e3 * statistics.median(found) for mode, found in steps_s.items()},
        "landings per step": landings,
        "speed left": left("with"),
        "speed left, control": left("control"),
    }


def checks_of(row: dict[str, Any]) -> dict[str, bool]:
    """Return the checks of the bound, and of the control."""
    left, control = row["speed left"], row["speed left, control"]
    return {
        f"{row['run']}: {row['landings per step']:.3f} updates land per step, at least {LANDINGS:.3f}": (
            row["landings per step"] >= LANDINGS
        ),
        f"{row['run']}: {left:.3f} of its speed is left, at least {SHARE}": left >= SHARE,
        f"{row['run']}: a collective that blocks leaves {control:.3f}, less than {SHARE}": control < SHARE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all modes in turns; return 1 if a bound is missed, or if the control does not miss it."""
    parser = report.options(__doc__)
    parser.add_argument("--numel", type=int, default=64 * 128**2, help="parameters, default 1M")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--inner", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--launches", type=int, default=5, help="launches of each mode")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each mode in each launch")
    parser.add_argument("--turn-s", type=float, default=3.0)
    args = parser.parse_args(argv)
    rows = [measure(inner, args) for inner in args.inner]
    checks = {sentence: holds for row in rows for sentence, holds in checks_of(row).items()}
    return report.conclude(args.out, rows, checks)


if __name__ == "__main__":
    raise SystemExit(main())
