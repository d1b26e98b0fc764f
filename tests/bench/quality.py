"""Compares the anchor's validation loss with data-parallel training on the same tokens, on the tiny recipe.

python -m tests.bench.quality                                       the defaults, three seeds: the table of the README
python -m tests.bench.quality --seed 1 --outer-lr 0.6 0.8 --align carry overwrite         a sweep: every combination
python -m tests.bench.quality --seed 1 --learners 4 --together 4 2 1       how many of four learners are in each round

1. Both train on the same batches in the same steps, from the same weights, with the same learning rates.
2. The anchor is evaluated after the drain, on the whole validation split.
3. Missing options come from the recipe, else from the package's defaults.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.simulate.fleet import Pace
from tests.bench import report
from tests.bench.tiny import Tiny
from tests.bench.training_fleet import TrainingFleet
from tests.bench.trials import outcomes

RUN_OPTIONS = ("sync_every", "num_fragments", "overlap", "outer_lr", "outer_momentum", "merge", "wire")
SIZE = ("learners", "steps", "seed")
KEYS = (*RUN_OPTIONS, "align", "lr", "learners", "steps", "together")
BOUND = 0.02


def data_parallel(tiny: Tiny, *, learners: int, steps: int, seed: int) -> float:
    """Return the validation loss of one model that trains on the batches of all learners."""
    trainee = tiny.model(seed, steps)
    for batch in itertools.islice(tiny.joined_batches(seed, learners), steps):
        trainee.step(batch)
    return trainee.validation_loss()


def decoupled(
    tiny: Tiny,
    config: RunConfig,
    learner: LearnerConfig,
    *,
    learners: int,
    steps: int,
    seed: int,
    together: int | None = None,
) -> float:
    """Return the validation loss of the anchor of a fleet.

    Args:
        together: learners in each round, which then start at different times in a period; None: all.
    """
    batch = tiny.data.hparams["batch_size"] * tiny.data.hparams["seq_len"]
    spread_s = 0.0 if together in (None, learners) else config.sync_every / learners
    fleet = TrainingFleet(
        config,
        learner,
        [tiny.model(seed, steps) for _ in range(learners)],
        [tiny.batches(seed, part, learners) for part in range(learners)],
        [Pace(step_s=1.0, tokens=batch, num_steps=steps, starts_s=m * spread_s) for m in range(learners)],
        together=together,
    )
    return fleet.anchor_loss(limit_s=2.0 * steps + 100)


def trials(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every combination of the given options."""
    swept = {name: getattr(args, name) for name in (*KEYS, "seed")}
    for values in itertools.product(*swept.values()):
        yield dict(zip(swept, values, strict=True))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all trials, and each baseline (lr, learners, steps, seed) once."""
    wanted = list(trials(args))
    keys = [] if args.no_data_parallel else list(dict.fromkeys(map(_baseline_of, wanted)))
    tasks = [partial(_baseline, args.recipe, key) for key in keys]
    tasks += [partial(_anchor, args.recipe, trial) for trial in wanted]
    losses = outcomes(tasks, args.jobs)
    baselines = dict(zip(keys, losses, strict=False))
    results = []
    for trial, loss in zip(wanted, losses[len(keys) :], strict=True):
        baseline = baselines.get(_baseline_of(trial))
        gap = None if baseline is None else loss / baseline - 1
        results.append({**trial, "data_parallel": baseline, "anchor": loss, "gap": gap})
    return results


def _baseline_of(trial: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(trial[name] for name in ("lr", *SIZE))


def _baseline(recipe: Path, key: tuple[Any, ...]) -> float:
    return data_parallel(Tiny(recipe, model={"lr": key[0]}), **dict(zip(SIZE, key[1:], strict=True)))


def _anchor(recipe: Path, trial: dict[str, Any]) -> float:
    tiny = Tiny(recipe, model={"lr": trial["lr"]})
    config = RunConfig(**{name: trial[name] for name in RUN_OPTIONS}).validate()
    return decoupled(
        tiny, config, LearnerConfig(align=trial["align"]), **{name: trial[name] for name in (*SIZE, "together")}
    )


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each setting: losses of each seed, mean and worst gap."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result.get(key) for key in KEYS), []).append(result)
    varied = [key for k, key in enumerate(KEYS) if len({group[k] for group in groups}) > 1]
    rows = []
    for group in groups.values():
        row: dict[str, Any] = {key: group[0][key] for key in varied}
        row["seeds"] = ", ".join(str(r["seed"]) for r in group)
        if group[0]["data_parallel"] is not None:
            row["data parallel"] = ", ".join(f"{r['data_parallel']:.4f}" for r in group)
        row["anchor"] = ", ".join(f"{r['anchor']:.4f}" for r in group)
        gaps = [r["gap"] for r in group if r["gap"] is not None]
        if gaps:
            row["mean gap"] = f"{statistics.mean(gaps):+.2%}"
            row["worst gap"] = f"{max(gaps):+.2%}"
        rows.append(row)
    return report.table(rows)


def parser() -> argparse.ArgumentParser:
    """Build the parser; each run option takes several values."""
    path = argparse.ArgumentParser(add_help=False)
    path.add_argument("--recipe", type=Path, default=Tiny().path)
    known, _ = path.parse_known_args()
    tiny, defaults = Tiny(known.recipe), RunConfig()
    options = report.options(__doc__)
    options.add_argument("--recipe", type=Path, default=tiny.path)
    for name in RUN_OPTIONS:
        default = tiny.strategy.get(name, getattr(defaults, name))
        kind = type(default)
        options.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs="+", default=[default])
    options.add_argument("--align", nargs="+", default=[tiny.strategy.get("align", LearnerConfig().align)])
    options.add_argument("--lr", type=float, nargs="+", default=[tiny.lr])
    options.add_argument("--learners", type=int, nargs="+", default=[2])
    options.add_argument("--steps", type=int, nargs="+", default=[tiny.num_steps])
    options.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--together", type=int, nargs="+", default=[None], help="learners in each round; default: all")
    options.add_argument("--jobs", type=int, default=1, help="processes; each takes one core")
    options.add_argument("--no-data-parallel", action="store_true")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if the gap of the defaults exceeds the bound."""
    args = parser().parse_args(argv)
    Tiny(args.recipe).data  # noqa: B018  prepares the data once, before other processes start
    results = run(args)
    print(summary(results))
    report.store(args.out, {"circumstances": report.circumstances(), "results": results})
    return int(len({tuple(r[k] for k in KEYS) for r in results}) == 1 and any((r["gap"] or 0) > BOUND for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
