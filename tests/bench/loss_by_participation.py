"""Measures whether the anchor's loss depends on how many learners take part in a round.

python -m tests.bench.loss_by_participation                                  every task, M = 4, three seeds
python -m tests.bench.loss_by_participation --tasks classifier --learners 2 8 --seeds 1

1. The real state machines and arithmetic run in one process with a simulated clock. Participation is forced (learners
   receive only rounds that their group opened), or results from slow networks, slow learners and late starts.
2. Each arm trains for the same number of steps per learner, with two exceptions. A slow learner makes fewer steps, so
   less of its part of the data is read; "without the slow one", none of it is; if data are leased, the others read it.
   And in "one leaves, one comes", one learner leaves at half time and another one joins.
3. In the control, weights are shares of the round, as in the paper.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.protocol.syncer.shares import shares_of_work
from lightning_diloco.simulate.fleet import Pace
from tests.bench import report
from tests.bench.tasks import BATCH, TASKS, Task
from tests.bench.training_fleet import TrainingFleet
from tests.bench.trials import by_seed

STEPS = {"classifier": 800, "gan": 1200}
BOUND, BOUND_PLAIN = 0.02, 0.05
FULL, CONTROL, SHORT = "all in every round", "control: shares of the round", "without the slow one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A pattern of participation.

    Args:
        together: share of learners in each round; 1 means all present.
        latency_steps: one-way latency of control messages, in steps.
        waits: whether the grace window is long enough for all learners, instead of 0.
        staggered: whether learners start at different times within one period.
        slowdown: factor by which the last learner is slower.
        leased: whether learners read what is next of all data, instead of a part each.
        is_short: whether the last learner takes no part, and no learner reads its part of the data.
        changes: whether the first learner leaves at half time and the last one joins then.
        normalized: whether weights are shares of the round instead of the fleet.
    """

    together: float = 1.0
    latency_steps: float | None = None
    waits: bool = True
    staggered: bool = False
    slowdown: int = 1
    leased: bool = False
    is_short: bool = False
    changes: bool = False
    normalized: bool = False


QUARTER = Arm(together=0.25, waits=False, staggered=True)
ARMS = {
    FULL: Arm(),
    "half of them": replace(QUARTER, together=0.5),
    "a quarter": QUARTER,
    "slow network, all wait": Arm(latency_steps=3),
    "slow network, nobody waits": Arm(latency_steps=3, waits=False, staggered=True),
    "slower network, nobody waits": Arm(latency_steps=10, waits=False, staggered=True),
    "one is 4x slower": Arm(slowdown=4, waits=False),
    "one is 10x slower": Arm(slowdown=10, waits=False),
    "one is 10x slower, leased data": Arm(slowdown=10, waits=False, leased=True),
    SHORT: Arm(is_short=True),
    "one leaves, one comes": Arm(changes=True),
    CONTROL: replace(QUARTER, normalized=True),
}


def anchor_loss(task: Task, arm: Arm, *, learners: int, steps: int, **options: Any) -> dict[str, float]:
    """Return the anchor's validation loss, and participation.

    Args:
        task: training task.
        arm: pattern of participation.
        learners: M.
        steps: inner steps of each learner; a slower one makes fewer.
        options: run options.
    """
    parts, learners = learners, learners - arm.is_short
    config = RunConfig(num_fragments=6, grace=10.0 if arm.waits else 0.0, **options)
    spread_s = config.sync_every / learners if arm.staggered else 0.0
    paces = [Pace(tokens=BATCH, num_steps=steps, starts_s=m * spread_s, drain_s=120.0) for m in range(learners)]
    paces[-1] = replace(paces[-1], step_s=float(arm.slowdown), num_steps=steps // arm.slowdown)
    if arm.changes:
        paces[0] = replace(paces[0], num_steps=steps // 2)
        paces[-1] = replace(paces[-1], num_steps=steps // 2, starts_s=float(steps // 2))
    fleet = TrainingFleet(
        config,
        LearnerConfig(),
        [task.model() for _ in range(learners)],
        task.leased_batches(learners) if arm.leased else [task.batches(part, parts) for part in range(learners)],
        paces,
        together=max(1, round(arm.together * learners)),
        latency_s=arm.latency_steps,
    )
    shares = _of_the_round if arm.normalized else shares_of_work
    with mock.patch("lightning_diloco.protocol.syncer.rounds.shares_of_work", shares):
        loss = fleet.anchor_loss(limit_s=3.0 * steps + 500)
    return {"loss": loss, "participation": fleet.participation}


def _of_the_round(contributors: Sequence[object], at_work: object) -> tuple[float, ...]:
    return (1 / len(contributors),) * len(contributors)


def _trial(name: str, arm: str | None, learners: int, seed: int, options: dict[str, Any]) -> dict[str, float]:
    task = TASKS[name](seed)
    if arm is None:
        return {"loss": task.plain(parts=learners, steps=STEPS[name]), "participation": 1.0}
    return anchor_loss(task, ARMS[arm], learners=learners, steps=STEPS[name], **options)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each task, number of learners and arm, with means over the seeds."""
    options = {name: value for name in ("merge", "outer_lr", "outer_momentum") if (value := getattr(args, name))}
    wanted = [(task, arm, m) for task in args.tasks for m in args.learners for arm in (None, *ARMS)]
    rows, means = [], dict[tuple[Any, ...], float]()
    for (task, arm, m), each in by_seed(_trial, wanted, args.seeds, options, jobs=args.jobs).items():
        means[task, arm, m] = loss = statistics.mean(one["loss"] for one in each)
        row: dict[str, Any] = {"task": task, "M": m, "run": arm or "plain Trainer, M times the batch", "loss": loss}
        row["participation"] = statistics.mean(one["participation"] for one in each)
        rows.append(row)
    for row, (task, arm, m) in zip(rows, wanted, strict=True):
        if arm is not None:
            row["against all"] = row["loss"] / means[task, FULL, m] - 1
            row["against plain"] = row["loss"] / means[task, None, m] - 1
    return rows


def checks(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return the checks of the classifier; a GAN's losses differ too much between seeds."""
    rows = [row for row in rows if row["task"] == "classifier" and "against all" in row]
    ours = [row for row in rows if row["run"] not in (CONTROL, SHORT, "one leaves, one comes")]
    control = min((row["against all"] for row in rows if row["run"] == CONTROL), default=0.0)
    worst, plain = (max(row[against] for row in ours) for against in ("against all", "against plain"))
    return {
        f"at most {worst:+.1%} against all in every round, bound {BOUND:+.0%}": worst <= BOUND,
        f"at most {plain:+.1%} against plain training, bound {BOUND_PLAIN:+.0%}": plain <= BOUND_PLAIN,
        f"the control is {control:+.1%} off, more than {BOUND:+.0%}": control > BOUND,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a check fails."""
    parser = report.options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--learners", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--merge", choices=("rda", "mean"))
    parser.add_argument("--outer-lr", type=float)
    parser.add_argument("--outer-momentum", type=float)
    parser.add_argument("--jobs", type=int, default=2, help="processes; each takes one core")
    args = parser.parse_args(argv)
    rows = run(args)
    columns = ["task", "M", "run", "participation", "loss", "against all", "against plain"]
    return report.conclude(args.out, rows, checks(rows) if "classifier" in args.tasks else {}, columns=columns)


if __name__ == "__main__":
    raise SystemExit(main())
