"""Checks that killing a learner does not slow down a busy one more than it slows down a plain Trainer.

python -m tests.bench.busy_survivors --out tests/bench/results/busy_survivors.json

1. Two learners of the tiny recipe each keep one core busy. The second is killed (SIGKILL), and stays dead or is
   restarted. The step clock times the first one's steps before and after the kill. `timed_recipe.py` times the hooks of
   the strategy in each step from outside.
2. The longest hook after the kill may exceed the longest one before by at most TOLERANCE_S. The hooks of a step are
   summed.
3. A core that becomes free, or a process that imports torch, changes the other's step times by itself. Therefore the
   same recipe also runs without the strategy, beside a syncer without learners, and one of its two processes is killed
   in the same way. The survivor's steps may slow down no more than there. The noise is estimated from the means of ten
   blocks of steps.
4. In the control, a learner waits for a missing peer once its lease has run out. Both checks must fail.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_diloco.cli.faults import step_log as step_clock
from lightning_diloco.cli.faults import story as chaos_story
from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.local.fleet import Fleet
from lightning_diloco.cli.run import syncer_argv
from tests.bench import local_run, report, timed_recipe
from tests.bench.tiny import RECIPE

SURVIVOR, VICTIM = "l0", "l1"
DEAD, AGAIN = "stays dead", "is started again"
WARM_UP_S = 3.0
START_S = 120.0
LINGER_S = 2.0  # the syncer would wait longer for a dead learner
NUM_BLOCKS = 10
T_95 = 2.101  # Student's t of 2 * (NUM_BLOCKS - 1) degrees of freedom, two-sided
TOLERANCE_S = 0.05
SHORT_LEASE_S = 2.0  # of the control: with a longer lease, the victim is back before it lapses
OVERRIDES = (
    "--trainer.max_steps=1000000",
    "--trainer.limit_val_batches=0",
    "--trainer.callbacks+=lightning_diloco.cli.faults.step_log.StepClock",
    "--trainer.callbacks+=tests.bench.idle_learner.EndWith",  # its path follows
)


class Killer:
    """Kills one of two learners after both have stepped for a while, and later ends the run.

    Args:
        folder: parent of both learners' folders.
        seconds: time before the kill, and again before the end.
        end: file whose appearance ends the learners.
    """

    def __init__(self, folder: Path, seconds: float, end: Path) -> None:
        self._folder, self._seconds, self._end = folder, seconds, end
        self.began_s = self.killed_s = self.ended_s = 0.0
        self._until_s = time.time() + START_S

    def __call__(self, fleet: Fleet, status: Status | None) -> None:
        now_s = time.time()
        if not self.began_s:
            if all(_steps(self._folder / name) for name in (SURVIVOR, VICTIM)):
                self.began_s = now_s + WARM_UP_S
            elif now_s > self._until_s:
                raise TimeoutError(f"two learners have not stepped after {START_S:.0f} s")
        elif not self.killed_s and now_s >= self.began_s + self._seconds:
            self.killed_s = time.time()
            os.killpg(fleet.pid(VICTIM), signal.SIGKILL)
        elif self.killed_s and not self.ended_s and now_s >= self.killed_s + self._seconds:
            self.ended_s = now_s
            self._end.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measurements of the survivor.

    Args:
        before_s, after_s: step times before and after the kill.
        hooks_before_s, hooks_after_s: time inside the strategy's hooks in each step; empty without the strategy.
        num_merged_after: contributions of the survivor that were merged after the kill.
        was_back: whether the victim stepped again.
        ledger_exact: value in the run's summary; None without the strategy.
    """

    before_s: Sequence[float]
    after_s: Sequence[float]
    hooks_before_s: Sequence[float]
    hooks_after_s: Sequence[float]
    num_merged_after: int
    was_back: bool
    ledger_exact: bool | None


def run(seconds: float, *, strategy: bool, restarts: bool, waits: bool = False) -> Seen:
    """Run once.

    Args:
        seconds: time before the kill, and again after it.
        strategy: whether to use the strategy instead of a plain Trainer.
        restarts: whether the victim is restarted.
        waits: whether this is the control.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-survivors-") as name:
        run_dir, end = Path(name), Path(name) / "end"
        killer = Killer(run_dir / "learners", seconds, end)
        module = ("tests.bench.timed_recipe", *(["--waits", end] if waits else []), "--local", 2)
        options = [*OVERRIDES, f"--trainer.callbacks.path={end}", *([] if strategy else ["--trainer.strategy=auto"])]
        lease = ("--lease-s", str(SHORT_LEASE_S)) if waits else ()
        local_run.run(
            run_dir,
            (*module, RECIPE, *options),
            2,
            killer,
            syncer_argv=(*syncer_argv(run_dir, 2), *lease),
            max_restarts=int(restarts),
            linger_s=LINGER_S,
        )
        return _seen(run_dir, killer)


def _seen(run_dir: Path, killer: Killer) -> Seen:
    folder = run_dir / "learners"
    if not killer.ended_s:
        raise RuntimeError(f"the survivor failed:\n{(folder / SURVIVOR / 'log.txt').read_text()[-4000:]}")
    (steps,) = _steps(folder / SURVIVOR)
    gaps = [(stop, stop - start) for start, stop in pairwise(steps)]
    hooks = [pair for path in (folder / SURVIVOR).glob(timed_recipe.PATTERN) for pair in timed_recipe.read_hooks(path)]
    story = chaos_story.read(run_dir)

    def within(pairs: Sequence[tuple[float, float]], since_s: float, until_s: float) -> list[float]:
        return [value for t, value in pairs if since_s < t <= until_s]

    before, after = (killer.began_s, killer.killed_s), (killer.killed_s, killer.ended_s)
    return Seen(
        before_s=within(gaps, *before),
        after_s=within(gaps, *after),
        hooks_before_s=within(hooks, *before),
        hooks_after_s=within(hooks, *after),
        num_merged_after=sum(c.t > killer.killed_s and SURVIVOR in c.learners for c in story.commits),
        was_back=len(_steps(folder / VICTIM)) > 1,
        ledger_exact=None if story.summary is None else story.summary["ledger_exact"],
    )


def _steps(folder: Path) -> list[Sequence[float]]:
    """Return the step times of each process of a learner that made a step."""
    return [steps for path in folder.glob(step_clock.PATTERN) if (steps := step_clock.read_steps(path))]


def row_of(name: str, seen: Seen) -> dict[str, Any]:
    """Return the table row of one run."""

    def longest_ms(values: Sequence[float]) -> float | None:
        return 1e3 * max(values) if values else None

    def share(hooks: Sequence[float], steps: Sequence[float]) -> str | None:
        return f"{sum(hooks) / sum(steps):.2%}" if hooks else None

    return {
        "run": name,
        "steps": f"{len(seen.before_s)} -> {len(seen.after_s)}",
        "in hooks": share(seen.hooks_before_s, seen.before_s),
        "in hooks, after": share(seen.hooks_after_s, seen.after_s),
        "longest hook [ms]": longest_ms(seen.hooks_before_s),
        "longest hook, after [ms]": longest_ms(seen.hooks_after_s),
        "step [ms]": 1e3 * statistics.mean(seen.before_s),
        "step, after [ms]": 1e3 * statistics.mean(seen.after_s),
        "change": f"{math.expm1(change_of(seen)[0]):+.1%}",
        "merged after": seen.num_merged_after if seen.hooks_before_s else None,
    }


def change_of(seen: Seen) -> tuple[float, float]:
    """Return the natural logarithm of the ratio of mean steps after and before, and its standard error."""
    (before_s, before), (after_s, after) = _mean(seen.before_s), _mean(seen.after_s)
    return math.log(after_s / before_s), math.hypot(before, after)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and its relative standard error from the means of blocks."""
    bounds = [round(k * len(values) / NUM_BLOCKS) for k in range(NUM_BLOCKS + 1)]
    blocks = [statistics.mean(values[start:stop]) for start, stop in pairwise(bounds)]
    mean_s = statistics.mean(values)
    return mean_s, statistics.stdev(blocks) / math.sqrt(NUM_BLOCKS) / mean_s


def checks_of(runs: Sequence[tuple[str, Seen, Seen]], control: Seen) -> dict[str, bool]:
    """Return the checks.

    Args:
        runs: for each run, what happens to the victim, and measurements with and without the strategy.
        control: measurements of the last run with the strategy and learners that wait.
    """
    calm_s = max(time_s for _, seen, _ in runs for time_s in seen.hooks_before_s)
    checks = {}
    for how, seen, plain in runs:
        _, noise = excess_of(seen, plain)  # also for the control, which has too few steps
        for said, found in [("", seen), *([("control, ", control)] if plain is runs[-1][2] else [])]:
            holds = found is seen
            longer_s, excess = max(found.hooks_after_s) - calm_s, excess_of(found, plain)[0]
            at_most = "at most" if holds else "not at most"
            checks[f"{said}{how}: the longest hook is {1e3 * longer_s:+.0f} ms longer, {at_most} +50 ms"] = (
                longer_s <= TOLERANCE_S
            ) is holds
            checks[f"{said}{how}: steps are {excess:+.1%} longer than without it, {at_most} {noise:+.1%} (noise)"] = (
                excess <= noise
            ) is holds
        checks[f"{how}: {seen.num_merged_after} contributions of the survivor were merged after the kill"] = (
            seen.num_merged_after > 0 and bool(seen.ledger_exact)
        )
    checks["who was started again stepped again"] = all(
        found.was_back is (how == AGAIN) for how, *both in runs for found in both
    )
    return checks


def excess_of(seen: Seen, plain: Seen) -> tuple[float, float]:
    """Return how much more the kill slows down steps with the strategy than without, and the noise of that value."""
    (change, error), (plain_change, plain_error) = change_of(seen), change_of(plain)
    return math.expm1(change - plain_change), math.expm1(T_95 * math.hypot(error, plain_error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a check fails, or the control's does not."""
    parser = report.options(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="before and after the kill in each of five runs")
    args = parser.parse_args(argv)
    runs = [
        (how, *(run(args.seconds, strategy=strategy, restarts=how == AGAIN) for strategy in (True, False)))
        for how in (DEAD, AGAIN)
    ]
    control = run(args.seconds, strategy=True, restarts=True, waits=True)
    rows = [
        row_of(name, seen)
        for how, *both in runs
        for name, seen in zip((f"the other {how}", f"plain, the other {how}"), both, strict=True)
    ]
    rows.append(row_of(f"control, the other {AGAIN}", control))
    return report.conclude(args.out, rows, checks_of(runs, control))


if __name__ == "__main__":
    raise SystemExit(main())
