"""Measures whether one broken learner of four changes the anchor's loss.

python -m tests.bench.broken_learner                          every way to be broken, three seeds
python -m tests.bench.broken_learner --kinds "sign flipped" --seeds 1 --merge median

1. The real state machines and arithmetic run in one process with a simulated clock (`training_fleet.py`). The
   contributions of the last learner are changed in transit, from the first step on, or from half time on.
2. The reference is a run of the other three learners alone, on their parts of the data. If a defect cannot be detected,
   because all numbers are usual, the table says so.
3. The control has neither judge nor limits: all finite contributions are merged, and all claims are believed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.quantize import decode, encode
from lightning_diloco.errors import NonFiniteError
from lightning_diloco.protocol import actions as do
from lightning_diloco.simulate.fleet import Pace
from lightning_diloco.simulate.learner import SimulatedLearner
from tests.bench import report
from tests.bench.tasks import BATCH, Classifier, Task
from tests.bench.training_fleet import TrainingFleet, Trains
from tests.bench.trials import by_seed

STEPS, LEARNERS = 800, 4
BOUND = 0.02
HUGE, CLAIMED = 6.7e33, 2**40

Spoil = Callable[[Tensor, int], Tensor]  # from trained values and the number of earlier changes to the sent values


def _random(values: Tensor, times: float) -> Tensor:
    noise = torch.randn(values.shape, dtype=torch.float64)
    return (noise * (times * values.double().norm() / noise.norm())).float()


def _huge(values: Tensor, number: int) -> Tensor:
    noise = torch.randn(values.shape, dtype=torch.float64)
    return (noise * (HUGE / noise.norm())).float()


class _Stale:
    """Repeats the first values of each fragment."""

    def __init__(self) -> None:
        self._first: dict[int, Tensor] = {}

    def __call__(self, values: Tensor, number: int) -> Tensor:
        return self._first.setdefault(number % 6, values)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to be broken.

    Args:
        spoil: computes the sent values from the trained ones.
        tokens: tokens counted for each step, independent of the batch.
        is_bounded: whether the loss may differ by at most BOUND; otherwise the difference is only shown.
    """

    spoil: Callable[[], Spoil] = lambda: lambda values, number: values
    tokens: int = BATCH
    is_bounded: bool = True


KINDS = {
    "random direction, 100x the norm": Kind(lambda: lambda values, number: _random(values, 100.0)),
    "random direction, 9x the norm": Kind(lambda: lambda values, number: _random(values, 9.0)),
    "random direction, usual norm": Kind(lambda: lambda values, number: _random(values, 1.0)),
    "norm 6.7e33": Kind(lambda: _huge),
    "sign flipped": Kind(lambda: lambda values, number: -values),
    "sign flipped, 9x the norm": Kind(lambda: lambda values, number: -9 * values),
    "all zero": Kind(lambda: lambda values, number: torch.zeros_like(values)),
    "stale copies": Kind(_Stale),
    "stale copies with noise": Kind(lambda: _noisy(_Stale())),
    "2^40 tokens a step": Kind(tokens=CLAIMED),
    "100x the tokens, stale copies": Kind(_Stale, tokens=100 * BATCH),
    "nothing": Kind(),
}


def _noisy(spoil: Spoil) -> Spoil:
    return lambda values, number: spoil(values, number) + _random(values, 0.01)


@dataclass(slots=True)
class Counted:
    """A model whose tokens are counted wrongly."""

    trainee: Trains
    tokens: int

    @property
    def module(self) -> torch.nn.Module:
        return self.trainee.module

    def step(self, batch: Any) -> int:
        self.trainee.step(batch)
        return self.tokens

    def validation_loss(self) -> float:
        return self.trainee.validation_loss()


class BrokenFleet(TrainingFleet):
    """A fleet whose last learner sends other values than it has trained.

    Args:
        spoil: makes what is sent.
        from_s: time at which the defect begins.
    """

    def __init__(self, *args: Any, spoil: Spoil, from_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spoil, self._from_s = spoil, from_s
        self.culprit = list(self.learners.values())[-1]

    def _sent(self, learner: SimulatedLearner, p: int, payload: Tensor) -> Tensor:
        if learner is not self.culprit or self.now_s < self._from_s:
            return payload
        about = {"wire": self.config.wire, "block_size": self.config.block_size}
        values = decode(payload, numel=self.store.layouts[p].padded_numel, **about)
        return encode(self._spoil(values, p), name="spoilt", **about)

    def events(self, kind: str) -> list[tuple[float, do.Note]]:
        """Return the events about the broken learner; fail if there are events about another one."""
        found = [(at_s, note) for at_s, note in self.syncer.notes if note.event == kind]
        assert all(note.fields["learner"] == self.culprit.name for _, note in found), found
        return found


def outcome(
    task: Task, kind: Kind | None, *, steps: int, guarded: bool = True, from_step: int = 0, **options: Any
) -> dict[str, Any]:
    """Return the anchor's loss and the fate of the broken learner; without a kind, the loss of the others alone."""
    torch.manual_seed(task.seed)
    config = RunConfig(num_fragments=6, grace=10.0, **options)
    learners = LEARNERS if kind else LEARNERS - 1
    paces = [Pace(tokens=BATCH, num_steps=steps, drain_s=120.0)] * (LEARNERS - 1)
    trainees: list[Trains] = [task.model() for _ in range(learners)]
    if kind is not None:
        paces.append(Pace(tokens=kind.tokens, num_steps=steps, drain_s=120.0))
        trainees[-1] = Counted(trainees[-1], kind.tokens)
    fleet = BrokenFleet(
        config, LearnerConfig(), trainees, [task.batches(part, LEARNERS) for part in range(learners)], paces,
        is_guarded=guarded, spoil=(kind or Kind()).spoil(), from_s=float(from_step),
    )  # fmt: skip
    with contextlib.nullcontext() if guarded else _unguarded():
        try:
            loss = fleet.anchor_loss(limit_s=3.0 * steps + 500, num_sound=LEARNERS - 1)
        except NonFiniteError:
            assert not guarded
            return {"loss": float("inf"), "refused": 0, "merged": 0, "quarantined at step": None, "told": None}
    first = next(iter(fleet.events("quarantine")), None)
    merged = sum(
        fleet.culprit.name in note.fields["learners"] for _, note in fleet.syncer.notes if note.event == "commit"
    )
    told = [note.fields for _, note in (*fleet.events("rejected"), *fleet.events("quarantine"))]
    return {
        "loss": loss,
        "refused": len(fleet.events("refused")),
        "merged": merged if kind else 0,
        "told": told[0].get("reason", told[0].get("text")) if told else None,
        "quarantined at step": None if first is None else first[0] - from_step,
    }


@contextlib.contextmanager
def _unguarded() -> Iterator[None]:
    with (
        mock.patch("lightning_diloco.protocol.syncer.shares.MAX_RATE", float("inf")),
        mock.patch("lightning_diloco.protocol.syncer.shares.MAD", float("inf")),
        mock.patch("lightning_diloco.protocol.syncer.claims.MAX_TOKENS", float("inf")),
    ):
        yield


def _trial(name: str | None, arm: str, seed: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    kind = None if name is None else KINDS[name]
    from_step = steps // 2 if arm == "from half time on" else 0
    return outcome(Classifier(seed), kind, steps=steps, guarded=arm != "control", from_step=from_step, **options)


ARMS = ("from the start", "from half time on", "control")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind and arm, with means over the seeds."""
    options = {"merge": args.merge} if args.merge else {}
    wanted: list[tuple[str | None, str]] = [(None, ARMS[0]), *((kind, arm) for kind in args.kinds for arm in args.arms)]
    found = by_seed(_trial, wanted, args.seeds, args.steps, options, jobs=args.jobs)
    rows, alone = [], statistics.mean(one["loss"] for one in found[wanted[0]])
    for (kind, arm), each in found.items():
        loss = statistics.mean(one["loss"] for one in each)
        row: dict[str, Any] = {"fourth learner": kind or "none", "broken": arm if kind else "", "loss": loss}
        row["against three"] = loss / alone - 1
        for name in ("merged", "refused"):
            row[name] = statistics.mean(one[name] for one in each)
        caught = [one["quarantined at step"] for one in each if one["quarantined at step"] is not None]
        row["quarantined at step"] = max(caught) if len(caught) == len(each) else None
        row["told"] = each[0]["told"]
        rows.append(row)
    return rows


def checks(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return the checks of the table."""
    broken = [row for row in rows if row["fourth learner"] not in ("none", "nothing")]
    ours = [row for row in broken if row["broken"] != "control" and KINDS[row["fourth learner"]].is_bounded]
    if not ours:
        return {}
    worst = max(ours, key=lambda row: row["against three"])
    control = max((row["against three"] for row in broken if row["broken"] == "control"), default=float("nan"))
    said = f"at most {worst['against three']:+.1%} against the other three alone ({worst['fourth learner']})"
    return {
        f"{said}, bound {BOUND:+.0%}": worst["against three"] <= BOUND,
        f"the control is {control:+.1%} off, more than {BOUND:+.0%}": not control <= BOUND,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if a check fails."""
    parser = report.options(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--merge", choices=("rda", "mean", "trimmed_mean", "median"))
    parser.add_argument("--jobs", type=int, default=2, help="processes; each takes one core")
    args = parser.parse_args(argv)
    rows = run(args)
    return report.conclude(args.out, rows, checks(rows), columns=[name for name in rows[0] if name != "told"])


if __name__ == "__main__":
    raise SystemExit(main())
