"""Tries other rules for the outer step than the package's, on the tiny recipe.

python -m tests.bench.outer_rules --learners 1 4 --batch-size 4 --out FILE              every rule
python -m tests.bench.outer_rules --rules "skip" "skip, lr by rho" --batch-size 4 16    some of them

1. Fleet, data and losses are those of `quality.py`, whose stored results also have the data-parallel losses and the
   package's defaults that the rules are compared with. They are read, not measured again.
2. A rule sees one fragment and one round: the merged outer gradient g, the momentum buffer, and the cosine c between
   contributions. It sets learning rate and momentum, and may scale g.
3. Results are stored after each trial. If the file exists, its trials are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lightning_diloco.config import CHAIN_LENGTH, LearnerConfig, RunConfig
from lightning_diloco.core.merge import MergeReport
from lightning_diloco.core.outer import Momentum, momentum_by_work, publish
from lightning_diloco.core.quantize import decode
from lightning_diloco.syncer.anchors import Anchor, AnchorStore
from tests.bench import quality, report, training_fleet
from tests.bench.tiny import RECIPE, Tiny
from tests.bench.trials import outcomes

Range = tuple[float, float]
TASK = ("batch_size", "learners", "sync_every", "steps", "seed")
STOCK, FIXED = "the defaults", "lr 0.7, mu 0.6"
START_RHO = 0.7  # before a correlation was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule for the outer step.

    Args:
        lr: outer learning rate, or its first and last value; between them it changes linearly over the planned rounds.
        mu: momentum, in the same form.
        lr_by_rho: lr = 1 - mu * rho; rho is the smoothed cosine of successive outer gradients.
        lr_by_buffer: the same with the rho of the package (`core/outer_lr.py`).
        lr_by_norm: lr while g is as long as it ever was, and lr for g = 0; linear between them.
        land: planned last rounds with lr 1 and mu 0.
        skip: a coordinate is not pushed by momentum that has another sign than g there.
        forget: the buffer of such a coordinate is set to 0.
        gain: g is multiplied by u**-gain, u = sqrt((1 + (M - 1) c) / M); with 1 this is the usual length of RDA.
        least: smallest rho of the package's that sets a learning rate.
        keep: weight of the past in the smoothed c and rho.
        by_signal: each coordinate of g is multiplied by this times g^2 / (g^2 + its variance between contributions).
    """

    lr: float | Range = 0.7
    mu: float | Range = 0.6
    lr_by_rho: bool = False
    lr_by_buffer: bool = False
    lr_by_norm: Range | None = None
    land: int = 0
    skip: bool = False
    forget: bool = False
    gain: float = 0.0
    least: float = 0.0
    keep: float = 0.8
    by_signal: float = 0.0


RULES = {
    "land: last round with lr 1, mu 0": Rule(land=1),
    "mu falls": Rule(mu=(0.6, 0.0), lr=(0.7, 1.0)),
    "lr rises": Rule(lr=(0.5, 1.1)),
    "lr by rho, mu 0.6": Rule(lr_by_rho=True, keep=0.5),
    "lr by rho, mu 0.8": Rule(lr_by_rho=True, mu=0.8),
    "lr by buffer, at most 1": Rule(lr_by_buffer=True),
    "lr by buffer, at most 0.7": Rule(lr_by_buffer=True, least=0.5),
    "lr by buffer, mu 0.8": Rule(lr_by_buffer=True, mu=0.8, least=0.3),
    "usual RDA": Rule(gain=1.0),
    "by signal": Rule(by_signal=1.5),
    "forget": Rule(forget=True),
    "skip": Rule(skip=True),
    "skip, mu 0.8": Rule(skip=True, mu=0.8),
    "skip, mu 0.9": Rule(skip=True, mu=0.9),
    "skip, mu 0.8, lr 0.5": Rule(skip=True, mu=0.8, lr=0.5),
    "skip, mu 0.8, lr rises": Rule(skip=True, mu=0.8, lr=(0.5, 1.1)),
    "skip, mu 0.8, lr rises higher": Rule(skip=True, mu=0.8, lr=(0.6, 1.2)),
    "skip, mu 0.8, lr by norm": Rule(skip=True, mu=0.8, lr_by_norm=(0.5, 1.0)),
    "skip, mu 0.8, lr by rho": Rule(skip=True, mu=0.8, lr_by_rho=True, keep=0.5),
    "skip, mu 0.8, lr by buffer": Rule(skip=True, mu=0.8, lr_by_buffer=True, least=0.3),
    "skip, mu 0.8, lr by rho, usual RDA": Rule(skip=True, mu=0.8, lr_by_rho=True, keep=0.5, gain=1.0),
    "skip, mu 0.8, lr 0.4, gain 2": Rule(skip=True, mu=0.8, lr=0.4, gain=2.0),
    "skip, mu 0.8, by signal": Rule(skip=True, mu=0.8, by_signal=1.5),
}


class _Usual:
    """An exponential average that begins with `start`, or else with its first value."""

    def __init__(self, keep: float, start: float | None = None) -> None:
        self.value, self._keep = start, keep

    def add(self, value: float) -> float:
        """Add a value; returns the average."""
        self.value = value if self.value is None else self._keep * self.value + (1 - self._keep) * value
        return self.value


class RuleStore(AnchorStore):
    """Anchors whose outer step follows a rule.

    Args:
        plan, config: as of `AnchorStore`.
        rule: the rule.
        num_rounds: planned rounds of each fragment.
    """

    def __init__(self, plan: Any, config: RunConfig, *, rule: Rule, num_rounds: float) -> None:
        super().__init__(plan, config)
        self._run, self._rule, self._num_rounds = config, rule, num_rounds
        self._cosines: dict[int, _Usual] = defaultdict(lambda: _Usual(rule.keep))
        self._rhos: dict[int, _Usual] = defaultdict(lambda: _Usual(rule.keep, START_RHO))
        self._last: dict[int, Tensor] = {}
        self._longest: dict[int, float] = defaultdict(float)

    def merge(self, p: int, contributions: Any, shares: Any, *args: Any) -> tuple[Tensor, MergeReport]:
        """Merge contributions, and scale the outer gradient."""
        gradient, found = super().merge(p, contributions, shares, *args)
        num, rule, factor = len(shares), self._rule, None
        if rule.gain and num > 1:
            gram = self.measure(p, contributions).gram_EMM.sum(0)
            between, own = float(gram.sum() - gram.diagonal().sum()), float(gram.diagonal().mean())
            cosine = max(0.0, self._cosines[p].add(between / (num * (num - 1)) / (own + 1e-30)))
            factor = ((1 + (num - 1) * cosine) / num) ** (-rule.gain / 2)
        if rule.by_signal and num > 1:
            how = {"wire": self._run.wire, "block_size": self._run.block_size}
            values = torch.stack([decode(one, numel=self.layouts[p].padded_numel, **how) for one in contributions])
            square, noise = values.mean(0) ** 2, values.var(0) / num
            factor = rule.by_signal * (square / (square + noise + 1e-30))
        return gradient if factor is None else (gradient.float() * factor).to(torch.bfloat16), found

    def next_state(self, p: int, outer_gradient: Tensor, *, work: float, in_place: bool = False) -> Anchor:
        """Make an outer step by the rule."""
        now, rule, gradient = self.anchor(p), self._rule, outer_gradient.float()
        lr, coefs = self._coefs(p, now.version, gradient, work)
        buffer, push, correlation = now.momentum, coefs.push, now.correlation
        if rule.lr_by_buffer:
            assert isinstance(rule.mu, float)
            how = {"work": work, "block_size": self._run.block_size}
            correlation = correlation.after(outer_gradient, buffer, mu=rule.mu, **how)
            lr = 1 - rule.mu * max(rule.least, correlation.rho)
        if rule.skip or rule.forget:
            agrees = (buffer * gradient) > 0
            buffer = buffer * agrees if rule.forget else buffer
            push = push * agrees if rule.skip else push
        buffer = buffer * coefs.decay + gradient
        master, published = now.master - (buffer * push + gradient) * lr, now.published.clone()
        update = publish(master, published, wire=self._run.wire, block_size=self._run.block_size)
        chain = (*now.chain, update)[-CHAIN_LENGTH:]
        return Anchor(now.generation, now.version + 1, master, published, buffer, chain, correlation)

    def _coefs(self, p: int, version: int, gradient: Tensor, work: float) -> tuple[float, Momentum]:
        rule, done = self._rule, min(1.0, version / self._num_rounds)
        if p in self._last:
            self._rhos[p].add(float(cosine_similarity(self._last[p], gradient, dim=0)))
        self._last[p] = gradient
        lr, mu = (_between(value, done) for value in (rule.lr, rule.mu))
        if version >= self._num_rounds - rule.land:
            lr, mu = (1.0, 0.0) if rule.land else (lr, mu)
        if rule.lr_by_rho:
            lr = 1 - mu * max(0.0, self._rhos[p].value or 0.0)
        if rule.lr_by_norm is not None:
            norm = float(gradient.norm()) / work
            self._longest[p] = max(self._longest[p], norm)
            lr = _between(rule.lr_by_norm, 1 - norm / self._longest[p])
        return lr, momentum_by_work(mu, work)


def _between(value: float | Range, part: float) -> float:
    return value[0] + (value[1] - value[0]) * part if isinstance(value, tuple) else value


def run(recipe: Path, trial: dict[str, Any]) -> dict[str, Any]:
    """Return loss and rho of one trial."""
    tiny = Tiny(recipe, data={"batch_size": trial["batch_size"]})
    period, rule = trial["sync_every"], RULES[trial["rule"]]
    options = {**tiny.strategy, "sync_every": period, "num_fragments": min(period, tiny.strategy["num_fragments"])}
    store = partial(RuleStore, rule=rule, num_rounds=trial["steps"] / period)
    size = {name: trial[name] for name in ("learners", "steps", "seed")}
    with mock.patch.object(training_fleet, "AnchorStore", store):
        found = quality.decoupled(tiny, RunConfig.with_defaults(options).validate(), LearnerConfig(), **size)
    return {**found, "options": asdict(rule)}


def rows(found: dict[str, Any], usual: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row for each rule, with the mean gap over the seeds to data parallel training in each setting.

    Args:
        found: stored results of this benchmark.
        usual: stored results of `quality.py`.
    """
    usual = {
        kind: [one for one in usual[kind] if (one["model"], one["optimizer"]) == ("recipe", "adamw")]
        for kind in ("data_parallel", "anchors")
    }
    gaps: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for task in sorted({_task(trial) for trial in found["trials"]}):
        size, learners, period, steps, _ = task
        column = (
            f"M={learners}, {size} sequences" + f", H={period}" * (period != 24) + f", {steps} steps" * (steps != 600)
        )
        alone = [one["loss"] for one in usual["data_parallel"] if _task(one) == (size, learners, None, *task[3:])]
        stock = {**asdict(RunConfig.with_defaults({"sync_every": period})), "lr": Tiny().lr, "together": None}
        names = ("outer_lr", "outer_momentum", "merge", "lr", "together")
        fixed = {**stock, "outer_lr": 0.7, "outer_momentum": 0.6}
        plain = [
            {**one, "rule": rule}
            for rule, wanted in ((STOCK, stock), (FIXED, fixed))
            for one in usual["anchors"]
            if all(one[name] == wanted[name] for name in names)
        ]
        for trial in (*plain, *found["trials"]):
            if _task(trial) == task:
                gaps[trial["rule"]][column] += [trial["loss"] / min(alone) - 1] if alone else []
    order = [STOCK, FIXED, *RULES]
    shown = {
        rule: {name: f"{statistics.mean(some):+.2%}" for name, some in of.items() if some} for rule, of in gaps.items()
    }
    return [{"rule": rule, **shown[rule]} for rule in sorted(shown, key=order.index)]


def _task(trial: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(trial.get(name) for name in TASK)


def summary(found: dict[str, Any]) -> str:
    """Return the table of all rules, with gaps to data parallel training."""
    lines = rows(found, json.loads((RECIPE.parent / "results" / "quality_by_learners.json").read_text()))
    columns = ["rule", *sorted({name for line in lines for name in line if name != "rule"})]
    return report.table([{name: line.get(name, "") for name in columns} for line in lines], columns)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not stored yet, then print."""
    options = report.options(__doc__)
    options.add_argument("--recipe", type=Path, default=RECIPE)
    options.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    options.add_argument("--batch-size", type=int, nargs="+", default=[16])
    options.add_argument("--learners", type=int, nargs="+", default=[4])
    options.add_argument("--sync-every", type=int, nargs="+", default=[24])
    options.add_argument("--steps", type=int, nargs="+", default=[600])
    options.add_argument("--seed", type=int, nargs="+", default=[1])
    options.add_argument("--jobs", type=int, default=1, help="processes; each takes one core")
    args: argparse.Namespace = options.parse_args(argv)
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"trials": []}
    names = ("rule", *TASK)
    swept = itertools.product(args.rules, *(getattr(args, name) for name in TASK))
    wanted = [dict(zip(names, values, strict=True)) for values in swept]
    missing = [trial for trial in wanted if not any(trial.items() <= one.items() for one in found["trials"])]

    def ended(index: int, result: dict[str, Any]) -> None:
        found["trials"].append({**missing[index], **result})
        report.store(args.out, {"circumstances": report.circumstances(), "trials": found["trials"]})

    outcomes([partial(run, args.recipe, trial) for trial in missing], args.jobs, ended)
    print(summary(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
