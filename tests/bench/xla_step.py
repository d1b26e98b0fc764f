"""What the strategy costs an inner step on an XLA device: the same Trainer with and without it, a fragment every step.

PJRT_DEVICE=CPU python -m tests.bench.xla_step [--shared]

1. A fragment every step is what the package's defaults do: sync_every=24, so 24 fragments.
2. A learner with the strategy and one without it take turns of seconds (turns.py). The median step of each turn is
   compared with that of its neighbour; the speed is the median of these pairs.
3. The control waits for the device in every hook: the same check must fail there.
4. PJRT's CPU device has cores of its own, in all modes alike (cores.py). With --shared it has not: the link's threads
   and the syncer take its cores then, as they would not take a TPU's. What each of them computed in a step is told.
5. torch_xla hands a graph to PJRT's CPU device when the one before has been computed. So the first sync of a hook waits
   for the step, and the next step is traced while the device has nothing to do; without the strategy it is traced
   beside the step. On such a device tracing is part of the strategy's cost, whatever cores there are: so the layers are
   few and wide. `--width 512 --depth 16` has four times the tensors to trace for as many parameters.
6. What an exchange costs the host is some milliseconds, however long a step is. The default batch makes steps of a
   second: its rows are an eighth of the tokens that one GPU of the 12B recipes has in a step. `--batch 1024` shows what
   steps lose that are shorter than any recipe's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import report, timed_recipe, turns

ROOT = Path(__file__).parents[2]
SPEED = 0.97
LANDINGS = 0.75  # per step: after each pause an exchange begins anew
CONTROL_ROUNDS = 6
MODES = ("without", "with", "control")
NOTES, END = "notes.json", "end"  # a program's files


def measure(mode: str, rounds: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A learner without the strategy and one of a mode, in turn; a row for each."""
    sizes = ("--width", args.width, "--depth", args.depth, "--batch", args.batch, "--warm-up", args.warm_up)
    common = ("-m", "tests.bench.xla_trainer", *sizes, "--anchor-device", args.anchor_device)
    command = (sys.executable, *map(str, common), *(["--shared"] if args.shared else []))
    programs = {it: (*command, "--mode", it) for it in ("without", mode)}
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        turns.playing(programs, Path(name), env={"PYTHONPATH": str(ROOT)}, warm_up=args.warm_up) as players,
    ):
        turns.take_turns(players.values(), rounds=rounds, turn_s=args.turn_s)
        plain_s, steps_s = (
            [statistics.median(turns.within(turn, player.steps_s)) for turn in player.turns]
            for player in players.values()
        )
        rows = []
        for it, player in players.items():
            (Path(name) / it / END).touch()
            player.end()
            found = {"landings per step": player.landings_per_step, **_hooks(Path(name) / it, player)}
            rows.append({"run": it, **found, **json.loads((Path(name) / it / NOTES).read_text())})
    return [figures(row, plain_s, found_s) for row, found_s in zip(rows, (plain_s, steps_s), strict=True)]


def figures(row: dict[str, Any], plain_s: Sequence[float], steps_s: Sequence[float]) -> dict[str, Any]:
    """A row with medians over turns: of the step, and of the speed beside the learner without the strategy."""
    speed = statistics.median(plain / ours for plain, ours in zip(plain_s, steps_s, strict=True))
    return {"run": row["run"], "step p50 [ms]": 1e3 * statistics.median(steps_s), **row, "speed": speed}


def _hooks(folder: Path, player: turns.Player) -> dict[str, float]:
    """What our hooks took of steps that ended in a turn."""
    pairs = [pair for path in folder.glob(timed_recipe.PATTERN) for pair in timed_recipe.read_hooks(path)]
    hooks_s = sorted(took_s for at_s, took_s in pairs if any(began <= at_s <= ended for began, ended in player.turns))
    return {
        f"hooks p{round(100 * share)} [ms]": 1e3 * report.quantile(hooks_s, share) if hooks_s else 0.0
        for share in (0.5, 0.95)
    }


def checks_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """The bound, that it can be missed, and that nothing is compiled."""
    checks = {}
    if "with" in rows:
        speed, graphs = rows["with"]["speed"], rows["with"]["graphs after warm-up"]
        checks[f"{speed:.3f} of the speed is left, at least {SPEED}"] = speed >= SPEED
        landings = rows["with"]["landings per step"]
        checks[f"{landings:.3f} updates land per step, at least {LANDINGS}"] = landings >= LANDINGS
        checks[f"{graphs:.0f} graphs are compiled after warm-up, none"] = graphs == 0
    if "control" in rows:
        speed = rows["control"]["speed"]
        checks[f"hooks that wait leave {speed:.3f}, less than {SPEED}"] = speed < SPEED
    return checks


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Let all modes take turns; 1 if steps are slower than allowed, the control is not, or something is compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each mode")
    parser.add_argument("--turn-s", type=float, default=5.0)
    parser.add_argument("--anchor-device", choices=("device", "host"), default="device")
    parser.add_argument("--shared", action="store_true", help="the device shares all cores with its host")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=list(MODES[1:]))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows: dict[str, dict[str, Any]] = {}
    for mode in args.modes:
        for row in measure(mode, min(args.rounds, CONTROL_ROUNDS) if mode == "control" else args.rounds, args):
            rows.setdefault(row["run"], row)
    checks = checks_of(rows)
    say(report.table(list(rows.values())))
    numel = args.depth * args.width * (args.width + 1)
    where = "all cores are shared" if args.shared else "half of the cores are for the device"
    say(f"\n{numel / 1e6:.1f}M parameters in 24 fragments, one a step; {args.batch} rows a step; {where}\n")
    say(report.verdicts(checks))
    report.store(args.out, {"circumstances": report.circumstances(), "rows": list(rows.values()), "checks": checks})
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
