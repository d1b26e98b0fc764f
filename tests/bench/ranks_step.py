"""What the strategy costs a learner of several ranks: its steps with and without it, for the same inner strategy.

python -m tests.bench.ranks_step

Two ranks with gloo whose compute sleeps. Learners with the strategy and without it take turns of seconds, and each turn
is compared with its neighbours (turns.py). They are launched several times: two launches of the same program differ by
up to 1.5 % of a step for as long as they live, about half of what is looked for. The control has one more collective
in every step, which waits for all ranks: the same check must fail there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import report, turns

ROOT = Path(__file__).parents[2]
SHARE = 0.97
LANDINGS = 0.9 * 4 / 24  # of what num_fragments and sync_every say
WARM_UP = 30  # steps, more than a period
MODES = {"without": ("--plain",), "with": (), "control": ("--blocks",)}


def measure(inner: str, args: argparse.Namespace) -> dict[str, Any]:
    """Learners of each mode, in figures."""
    launches = [launch(inner, args) for _ in range(args.launches)]
    steps_s = {mode: [mean_s for steps_s, _ in launches for mean_s in steps_s[mode]] for mode in MODES}
    return figures(inner, steps_s, statistics.mean(landings for _, landings in launches))


def launch(inner: str, args: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """One learner of each mode: mean seconds of a step in each turn of each mode, and landings per step."""
    common = ("-m", "tests.bench.ranks_trainer", "--inner", inner, "--numel", args.numel, "--step-s", args.step_s)
    programs = {mode: (sys.executable, *map(str, common), *options) for mode, options in MODES.items()}
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        turns.playing(programs, Path(name), env=env, warm_up=WARM_UP) as players,
    ):
        turns.take_turns(players.values(), rounds=args.rounds, turn_s=args.turn_s)
        steps_s = {mode: [*map(statistics.mean, player.steps_by_turn())] for mode, player in players.items()}
        return steps_s, players["with"].landings_per_step


def figures(inner: str, steps_s: Mapping[str, Sequence[float]], landings: float) -> dict[str, Any]:
    """Medians over the rounds, of steps and of what part of its speed is left in a round.

    Args:
        inner: the strategy inside.
        steps_s: mean seconds of a step, exchanges included, in each turn of each mode.
        landings: per step with the strategy.
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
    """The bound, and that it can be missed."""
    left, control = row["speed left"], row["speed left, control"]
    return {
        f"{row['run']}: {row['landings per step']:.3f} updates land per step, at least {LANDINGS:.3f}": (
            row["landings per step"] >= LANDINGS
        ),
        f"{row['run']}: {left:.3f} of its speed is left, at least {SHARE}": left >= SHARE,
        f"{row['run']}: a collective that blocks leaves {control:.3f}, less than {SHARE}": control < SHARE,
    }


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Let all modes take turns; 1 if a bound is missed, or the control does not miss it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 * 128**2, help="parameters, default 1M")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--inner", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--launches", type=int, default=5, help="of each mode")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each mode in each launch")
    parser.add_argument("--turn-s", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = [measure(inner, args) for inner in args.inner]
    checks = {sentence: holds for row in rows for sentence, holds in checks_of(row).items()}
    say(report.table(rows))
    say("\n" + report.verdicts(checks))
    report.store(args.out, {"circumstances": report.circumstances(), "rows": rows, "checks": checks})
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
