"""Cost of the strategy per inner step on an XLA device: the same Trainer with and without it, a fragment every step.

PJRT_DEVICE=CPU python -m tests.bench.xla_step [--shared] [--as-it-comes]

1. The package's defaults exchange a fragment in every step: sync_every=24, so 24 fragments.
2. A learner with the strategy and one without it take turns of some seconds (turns.py). The median step of each turn is
   compared with that of its neighbor. The speed is the median over these pairs.
3. The control uses the strategy, but waits for the device at the end of each step. The host's work then no longer
   overlaps with the device's, and the same check must fail.
4. PJRT's CPU device has dedicated cores in all modes (cores.py). With --shared, the link's threads and the syncer
   compete for its cores, which they would not do on a TPU. The table shows the CPU time of each per step.
5. In all modes, the device queues graphs ahead, as a TPU does, and the host is at most two steps ahead of it. With
   --as-it-comes, PJRT's CPU does not queue graphs. If a graph uses buffers that another graph updates in place, the
   graph and its host wait for the other one to end. A copy to the host waits for a thread of the device, which has as
   many as cores. So the first graph of a hook waits for the step, and the device is idle while the next step is traced.
6. An exchange costs the host some milliseconds, independent of the step time. The default batch makes steps of a
   second; its rows are an eighth of the tokens per step of one GPU in the 12B recipes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import report, timed_recipe, turns
from tests.bench.stack import CONTROL, END, NOTES, WITH, WITHOUT

SPEED = 0.97
LANDINGS = 0.9  # per step
FIRST_S = 3.0  # start of a turn, when little lands: an exchange takes some steps, two of them on the device
CONTROL_ROUNDS = 6
AHEAD = {"XLA_ENABLE_PARAM_ALIASING": "0", "NPROC": "4"}  # what PJRT's CPU reads, see 5


def measure(ours: str, rounds: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a learner without the strategy and one with it in turns; return a row for each.

    Args:
        ours: mode of the learner with the strategy.
        rounds: turns of each.
        args: all other options.
    """
    sizes = ("--width", args.width, "--depth", args.depth, "--batch", args.batch, "--warm-up", args.warm_up)
    common = ("-m", "tests.bench.xla_trainer", *sizes, "--anchor-device", args.anchor_device)
    command = (sys.executable, *map(str, common), *(["--shared"] if args.shared else []))
    programs = {mode: (*command, "--mode", mode) for mode in (WITHOUT, ours)}
    env = {"PYTHONPATH": str(report.ROOT), **({} if args.as_it_comes else AHEAD)}
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        turns.playing(programs, Path(name), env=env, warm_up=args.warm_up) as players,
    ):
        turns.take_turns(players.values(), rounds=rounds, turn_s=args.turn_s, first_s=FIRST_S)
        plain_s, steps_s = ([*map(statistics.median, player.steps_by_turn())] for player in players.values())
        rows = []
        for mode, player in players.items():
            (Path(name) / mode / END).touch()
            player.end()
            found = {"landings per step": player.landings_per_step, **_hooks(Path(name) / mode, player)}
            found |= json.loads((Path(name) / mode / NOTES).read_text())
            rows.append(figures(mode, plain_s, plain_s if mode == WITHOUT else steps_s, found))
    return rows


def figures(run: str, plain_s: Sequence[float], steps_s: Sequence[float], found: Mapping[str, float]) -> dict[str, Any]:
    """Return a row with medians over turns of the step time, and of the speed relative to the plain learner."""
    speed = statistics.median(plain / ours for plain, ours in zip(plain_s, steps_s, strict=True))
    return {"run": run, "step p50 [ms]": 1e3 * statistics.median(steps_s), **found, "speed": speed}


def _hooks(folder: Path, player: turns.Player) -> dict[str, float]:
    """Return the time of the strategy's hooks in steps that ended in a turn."""
    hooks_s = timed_recipe.hooks_within(folder, player.turns)
    return {
        f"hooks p{round(100 * share)} [ms]": 1e3 * report.quantile(hooks_s, share) if hooks_s else 0.0
        for share in (0.5, 0.95)
    }


def checks_of(row: Mapping[str, float], control: Mapping[str, float]) -> dict[str, bool]:
    """Return the checks of speed, landings and compilations, and of the control."""
    speed, landings, graphs = row["speed"], row["landings per step"], row["graphs after warm-up"]
    return {
        f"{speed:.3f} of the speed is left, at least {SPEED}": speed >= SPEED,
        f"{landings:.3f} updates land per step, at least {LANDINGS}": landings >= LANDINGS,
        f"{graphs:.0f} graphs are compiled after warm-up, none": graphs == 0,
        f"a step that waits for the device leaves {control['speed']:.3f}, less than {SPEED}": control["speed"] < SPEED,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run both in turns; return 1 if steps are too slow, the control's are not, or a graph is compiled."""
    parser = report.options(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each mode")
    parser.add_argument("--turn-s", type=float, default=9.0)
    parser.add_argument("--anchor-device", choices=("device", "host"), default="device")
    parser.add_argument("--shared", action="store_true", help="the device shares all cores with its host")
    parser.add_argument("--as-it-comes", action="store_true", help="the device waits where PJRT's CPU does")
    args = parser.parse_args(argv)
    rows = [*measure(WITH, args.rounds, args), *measure(CONTROL, min(args.rounds, CONTROL_ROUNDS), args)]
    numel = args.depth * args.width * (args.width + 1)
    where = "all cores are shared" if args.shared else "half of the cores are for the device"
    print(f"{numel / 1e6:.1f}M parameters in 24 fragments, one a step; {where}\n")
    return report.conclude(args.out, rows, checks_of(rows[1], rows[3]))


if __name__ == "__main__":
    raise SystemExit(main())
