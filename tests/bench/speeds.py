"""Two learners of the tiny recipe with one token budget: does a learner that is four times slower cost time or loss?

python -m tests.bench.speeds --out tests/bench/results/speeds.json

1. Runs are those of `diloco run`, with real training. `Pace` fills up each step to a fixed time, so that two cores are
   enough and the speeds are known. It also notes when each sequence was trained.
2. Both pairs lease their data and end at the same number of tokens of the whole run (`max_fleet_tokens`). The learning
   rate follows these tokens as well. So the losses of their anchors are compared at equal tokens.
3. A learner is idle while it is in the strategy's hooks, which are timed from outside, and from its last step to the
   last step of any learner.
4. An epoch ends together if each learner trains its last sequence of it at the same time. The first epoch ends when no
   sequence is new any more.
5. In the control, each learner trains its fixed part of the data once.
6. Each run is stored at its end, with its date and commit. A run that is stored with the same options is not repeated.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lightning_diloco.cli.faults import story as chaos_story
from lightning_diloco.cli.faults.step_log import read_steps
from tests.bench import local_run, report, timed_recipe
from tests.bench.landing_clock import Numbers
from tests.bench.report import Row
from tests.bench.tiny import RECIPE, Batch, Tiny

FAST, SLOW = "l0", "l1"
NAMES = (FAST, SLOW)
SLOWDOWN = 4
PATTERN = "sequences-*.f64"
EQUAL, UNEQUAL, CONTROL = "equal speeds", f"one is {SLOWDOWN}x slower", "control: fixed parts"
IDLE, EXCESS, TOGETHER, PARTICIPATION = 0.03, 0.01, 0.05, 0.5


class Pace(Callback):
    """Makes each step last `step_s`, or SLOWDOWN times as long for a slow learner, and notes the trained sequences.

    Args:
        step_s: seconds per step.
        slow: name of the slow learner, if any.
    """

    def __init__(self, step_s: float, slow: str = "") -> None:
        self._step_s = step_s * (SLOWDOWN if os.environ["DILOCO_LEARNER"] == slow else 1)
        self._until_s = 0.0
        self._sequences: Numbers | None = None

    def on_train_batch_start(self, trainer: L.Trainer, _: L.LightningModule, batch: Batch, batch_idx: int) -> None:
        if self._sequences is None:
            self._sequences = Numbers(Path(trainer.default_root_dir), PATTERN)
            self._until_s = time.monotonic()
        for tokens in batch["input_ids"]:
            self._sequences.append(time.time(), zlib.crc32(tokens.numpy().tobytes()))

    def on_train_batch_end(self, *_: Any) -> None:
        self._until_s = max(self._until_s + self._step_s, time.monotonic())
        time.sleep(max(0.0, self._until_s - time.monotonic()))


def run(name: str, seed: int, *, step_s: float, steps: int) -> dict[str, Any]:
    """Run once, and return its figures.

    Args:
        name: EQUAL, UNEQUAL or CONTROL.
        seed: seed of weights and data order.
        step_s: seconds per step of a fast learner.
        steps: steps that each learner would make, if they were equal.
    """
    tiny = Tiny()
    data, model = (tiny.recipe[section]["init_args"] for section in ("data", "model"))
    tokens_per_step = data["batch_size"] * data["seq_len"]
    budget = len(NAMES) * steps * tokens_per_step
    ends = ("--trainer.max_steps=-1", f"--trainer.strategy.max_fleet_tokens={budget}")
    if name == CONTROL:
        ends = ("--trainer.max_steps=-1", "--trainer.max_epochs=1", "--data.leases=false")
    options = (
        f"--seed_everything={seed}",
        f"--trainer.val_check_interval={100 * steps}",  # the final anchor only
        "--model.warmup_steps=0",
        f"--model.warmup_tokens={len(NAMES) * model['warmup_steps'] * tokens_per_step}",
        f"--model.schedule_tokens={budget}",
        "--trainer.callbacks+=lightning_diloco.cli.faults.step_log.StepClock",
        "--trainer.callbacks+=tests.bench.speeds.Pace",
        f"--trainer.callbacks.step_s={step_s}",
        f"--trainer.callbacks.slow={'' if name == EQUAL else SLOW}",
    )
    with tempfile.TemporaryDirectory(prefix="diloco-speeds-") as folder:
        run_dir = Path(folder)
        learner = ("tests.bench.timed_recipe", "--local", len(NAMES), RECIPE, *ends, *options)
        ended = local_run.run(run_dir, learner, len(NAMES), lambda *_: None)
        if ended.exit_code or ended.summary is None:
            raise RuntimeError("the run failed:\n" + (run_dir / "learners" / FAST / "log.txt").read_text()[-4000:])
        return {**_figures(run_dir), **_of(ended.summary)}


def _of(summary: dict[str, Any]) -> Row:
    return {
        "participation": summary["participation"],
        "tokens merged [M]": summary["tokens_merged"] / len(summary["versions"]) / 1e6,
        "ledger exact": float(summary["ledger_exact"]),
        "loss": summary["eval_loss"],
    }


def _figures(run_dir: Path) -> Row:
    """Return what the clocks of the learners saw."""
    learners = chaos_story.read(run_dir).learners
    times = {name: [t for t in one.lives[0] if not math.isnan(t)] for name, one in learners.items()}
    end_s = max(steps[-1] for steps in times.values())
    idle = {}
    for name, steps in times.items():
        (path,) = (run_dir / "learners" / name).glob(timed_recipe.PATTERN)
        in_hooks_s = sum(taken_s for t, taken_s in timed_recipe.read_hooks(path) if steps[0] < t <= steps[-1])
        idle[name] = (in_hooks_s + end_s - steps[-1]) / (end_s - steps[0])
    step_s = {name: statistics.median(b - a for a, b in pairwise(steps)) for name, steps in times.items()}
    epoch_s, apart_s = _first_epoch({name: _sequences(run_dir / "learners" / name) for name in times})
    return {
        "slower": step_s[SLOW] / step_s[FAST],
        "minutes": (end_s - min(steps[0] for steps in times.values())) / 60,
        "steps, fast": len(times[FAST]),
        "steps, slow": len(times[SLOW]),
        "idle, fast": idle[FAST],
        "idle, slow": idle[SLOW],
        "ends of the epoch, apart": apart_s / epoch_s,
    }


def _sequences(folder: Path) -> list[tuple[float, float]]:
    (path,) = folder.glob(PATTERN)
    values = read_steps(path)
    return list(zip(values[::2], values[1::2], strict=True))


def _first_epoch(trained: dict[str, list[tuple[float, float]]]) -> tuple[float, float]:
    """Return how long the first epoch took, and how far apart its learners ended it.

    Args:
        trained: (time, sequence) of each learner, in order.
    """
    first_of = dict[float, tuple[float, str]]()
    for t, name, sequence in sorted((t, name, sequence) for name, each in trained.items() for t, sequence in each):
        first_of.setdefault(sequence, (t, name))
    ends_s = [max(t for t, by in first_of.values() if by == name) for name in trained]
    return max(ends_s) - min(t for t, _ in first_of.values()), max(ends_s) - min(ends_s)


def checks_of(rows: Sequence[Row], minutes: float) -> dict[str, bool]:
    """Return the checks; `minutes` are those of equal learners without any loss of time."""
    equal, unequal, control = rows
    excess = unequal["loss"] / equal["loss"] - 1
    idle, idle_control = (max(row["idle, fast"], row["idle, slow"]) for row in (unequal, control))
    apart, apart_control = (row["ends of the epoch, apart"] for row in (unequal, control))
    more = unequal["tokens merged [M]"] / equal["tokens merged [M]"] - 1
    longer = unequal["minutes"] / (minutes * 2 / (1 + 1 / unequal["slower"])) - 1
    return {
        f"the slow learner is {unequal['slower']:.1f} times slower, and tokens merged differ by {abs(more):.1%}": (
            abs(unequal["slower"] / SLOWDOWN - 1) < 0.1 and abs(more) < 0.01
        ),
        f"each learner is idle for at most {idle:.1%}, bound {IDLE:.0%}": idle <= IDLE,
        f"the run takes {longer:.1%} longer than the steps of both learners together, bound {IDLE:.0%}": longer <= IDLE,
        f"their ends of the first epoch are {apart:.1%} of it apart, bound {TOGETHER:.0%}": apart <= TOGETHER,
        f"{unequal['participation']:.0%} take part in a round, at least {PARTICIPATION:.0%}": (
            unequal["participation"] >= PARTICIPATION
        ),
        f"loss at equal tokens {excess:+.2%}, at most {EXCESS:+.0%}": excess <= EXCESS,
        "every ledger is exact": all(row["ledger exact"] == 1 for row in rows),
        f"the control is idle for {idle_control:.0%}, more than {IDLE:.0%}": idle_control > IDLE,
        f"its ends of the first epoch are {apart_control:.0%} apart, more than {TOGETHER:.0%}": (
            apart_control > TOGETHER
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a bound is missed."""
    parser = report.options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--step-s", type=float, default=0.12, help="seconds per step of a fast learner")
    parser.add_argument("--steps", type=int, default=Tiny().num_steps, help="steps of each learner, if they are equal")
    args = parser.parse_args(argv)
    each = json.loads(args.out.read_text())["each"] if args.out is not None and args.out.exists() else {}
    rows = []
    for name in (EQUAL, UNEQUAL, CONTROL):
        found = []
        for seed in args.seeds[:1] if name == CONTROL else args.seeds:
            key = f"{name}, seed {seed}, {args.steps} steps of {args.step_s:g} s"
            if key not in each:
                figures, here = run(name, seed, step_s=args.step_s, steps=args.steps), report.circumstances()
                each[key] = {"when": f"{here['date']}, {here['commit']}", "figures": figures}
                report.store(args.out, {"each": each})
            found.append(each[key])
        means = {column: statistics.mean(one["figures"][column] for one in found) for column in found[0]["figures"]}
        rows.append({"run": name, **means, "when": "; ".join(sorted({one["when"] for one in found}))})
    return report.conclude(args.out, rows, checks_of(rows, args.step_s * args.steps / 60), each=each)


if __name__ == "__main__":
    raise SystemExit(main())
