"""Compares the anchor's validation loss with data-parallel training on the same tokens, on the tiny recipe.

python -m tests.bench.quality                                       the defaults, three seeds: the table of the README
python -m tests.bench.quality --seed 1 --outer-lr 0.6 0.8 --align carry overwrite         a sweep: every combination
python -m tests.bench.quality --seed 1 --learners 4 --together 4 2 1       how many of four learners are in each round
python -m tests.bench.quality --learners 1 2 4 8 --steps 600 2400 --batch-size 4 --baseline-lr 4e-3 8e-3 --out FILE

1. Both train on the same batches in the same steps, from the same weights.
2. The learning rate of the data-parallel model is the best of `--baseline-lr`, by its mean loss over the seeds; by
   default there is only that of the learners.
3. The anchor is evaluated after the drain, on the whole validation split.
4. Missing options come from the recipe, else from the package's defaults.
5. Results are stored after each trial. If the file exists, its trials are not run again.
6. rho is the cosine of two successive outer gradients of a fragment, averaged over the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.simulate.fleet import Pace
from tests.bench import report
from tests.bench.tiny import Tiny
from tests.bench.training_fleet import TrainingFleet
from tests.bench.trials import outcomes

Trial = dict[str, Any]

RUN_OPTIONS = ("sync_every", "num_fragments", "overlap", "outer_lr", "outer_momentum", "merge", "wire")
TASK = ("model", "text_mb", "optimizer", "batch_size", "learners", "steps")
KEYS = (*TASK, *RUN_OPTIONS, "align", "lr", "together")
MODELS: dict[str, dict[str, int]] = {
    "recipe": {},  # 0.12M parameters
    "1M": {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 5},
    "5M": {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 9},
}
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
) -> Trial:
    """Return the validation loss of the anchor of a fleet, and rho.

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
    return {"loss": fleet.anchor_loss(limit_s=2.0 * steps + 100), "rho": fleet.correlation}


def trials(args: argparse.Namespace) -> Iterator[Trial]:
    """Yield every combination of the given options, with the package's defaults for the missing ones."""
    swept = {name: getattr(args, name) for name in (*KEYS, "seed")}
    for values in itertools.product(*swept.values()):
        trial = dict(zip(swept, values, strict=True))
        config = RunConfig.with_defaults({name: trial[name] for name in RUN_OPTIONS if trial[name] is not None})
        yield trial | {name: getattr(config, name) for name in RUN_OPTIONS}


def baselines(args: argparse.Namespace) -> Iterator[Trial]:
    """Yield every data-parallel run that the trials are compared with."""
    swept = {name: getattr(args, name) for name in (*TASK, "seed")}
    for lr, values in itertools.product(args.baseline_lr or args.lr, itertools.product(*swept.values())):
        yield {"lr": lr, **dict(zip(swept, values, strict=True))}


def run(args: argparse.Namespace) -> Trial:
    """Run what is not stored yet; returns the stored results of data parallel training and of anchors."""
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"data_parallel": [], "anchors": []}
    wanted = [("anchors", trial) for trial in trials(args)]
    if not args.no_data_parallel:
        wanted = [*(("data_parallel", trial) for trial in baselines(args)), *wanted]
    missing = [
        (kind, trial) for kind, trial in wanted if not any(trial.items() <= result.items() for result in found[kind])
    ]

    def ended(index: int, result: Trial) -> None:
        kind, trial = missing[index]
        seen = report.circumstances()
        found[kind].append({**trial, **result, "date": seen["date"], "commit": seen["commit"]})
        report.store(args.out, {**found, "circumstances": seen})

    work = {"data_parallel": _baseline, "anchors": _anchor}
    outcomes([partial(work[kind], args.recipe, trial) for kind, trial in missing], args.jobs, ended)
    return found


def _tiny(recipe: Path, trial: Trial) -> Tiny:
    config = Tiny(recipe).recipe["model"]["init_args"]["config"]
    model = {"lr": trial["lr"], "config": config | MODELS[trial["model"]]}
    data = {"batch_size": trial["batch_size"], "max_bytes": round(trial["text_mb"] * 1e6)}
    return Tiny(recipe, model=model, data=data, optimizer=trial["optimizer"])


def _baseline(recipe: Path, trial: Trial) -> Trial:
    size = {name: trial[name] for name in ("learners", "steps", "seed")}
    return {"loss": data_parallel(_tiny(recipe, trial), **size)}


def _anchor(recipe: Path, trial: Trial) -> Trial:
    config = RunConfig(**{name: trial[name] for name in RUN_OPTIONS}).validate()
    size = {name: trial[name] for name in ("learners", "steps", "seed", "together")}
    return decoupled(_tiny(recipe, trial), config, LearnerConfig(align=trial["align"]), **size)


def compared(found: Trial) -> list[Trial]:
    """Return a row for each setting: losses by seed, their gaps to tuned data-parallel training, rho, and when."""
    rows = []
    for options, group in _groups(found["anchors"], KEYS).items():
        row = dict(zip(KEYS, options, strict=True))
        alone = [one for one in found["data_parallel"] if all(one[name] == row[name] for name in TASK)]
        by_lr = {lr: {one["seed"]: one["loss"] for one in of_lr} for (lr,), of_lr in _groups(alone, ("lr",)).items()}
        seeds = [one["seed"] for one in group]
        by_lr = {lr: losses for lr, losses in by_lr.items() if losses.keys() >= set(seeds)}
        best = min(by_lr, key=lambda lr: statistics.mean(by_lr[lr][seed] for seed in seeds), default=None)
        row |= {"seeds": seeds, "anchor": [one["loss"] for one in group], "baseline_lr": best}
        row["rho"] = statistics.mean(one["rho"] for one in group)
        row["when"] = when([*group, *(one for one in alone if one["lr"] == best and one["seed"] in seeds)])
        row["data_parallel"] = [by_lr[best][seed] for seed in seeds] if best is not None else []
        row["gaps"] = [mine / theirs - 1 for mine, theirs in zip(row["anchor"], row["data_parallel"], strict=False)]
        rows.append(row)
    return rows


def when(results: Iterable[Trial]) -> str:
    """Return dates and commits of trials."""
    commits: dict[str, set[str]] = {}
    for one in results:
        commits.setdefault(one["date"], set()).add(one["commit"])
    return "; ".join(f"{date}, {', '.join(sorted(those))}" for date, those in sorted(commits.items()))


def _groups(results: Sequence[Trial], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Trial]]:
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for result in results:
        groups.setdefault(tuple(result[key] for key in keys), []).append(result)
    return groups


def summary(rows: Sequence[Trial], always: Sequence[str] = ()) -> str:
    """Return a table with a row for each setting: losses of each seed, mean and worst gap.

    Args:
        rows: rows of `compared`.
        always: settings that are shown even if they are the same in all rows.
    """
    varied = [key for key in KEYS if key in always or len({row[key] for row in rows}) > 1]
    return report.table([{**{key: row[key] for key in varied}, **_shown(row)} for row in rows])


def _shown(row: Trial) -> Trial:
    shown = {"seeds": ", ".join(map(str, row["seeds"]))}
    if gaps := row["gaps"]:
        shown["data parallel"] = ", ".join(f"{loss:.4f}" for loss in row["data_parallel"])
        shown["its lr"] = row["baseline_lr"]
    shown["anchor"] = ", ".join(f"{loss:.4f}" for loss in row["anchor"])
    if gaps:
        shown |= {"mean gap": f"{statistics.mean(gaps):+.2%}", "worst gap": f"{max(gaps):+.2%}"}
    return {**shown, "rho": f"{row['rho']:.2f}"}


def parser() -> argparse.ArgumentParser:
    """Build the parser; each run option takes several values."""
    path = argparse.ArgumentParser(add_help=False)
    path.add_argument("--recipe", type=Path, default=Tiny().path)
    known, _ = path.parse_known_args()
    tiny, defaults = Tiny(known.recipe), RunConfig()
    options = report.options(__doc__)
    options.add_argument("--recipe", type=Path, default=tiny.path)
    for name in RUN_OPTIONS:
        usual = tiny.strategy.get(name, getattr(defaults, name))
        follows = name == "outer_momentum" and name not in tiny.strategy  # follows from sync_every
        default, kind = [None if follows else usual], _rate if name == "outer_lr" else type(usual)
        options.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs="+", default=default)
    options.add_argument("--align", nargs="+", default=[tiny.strategy.get("align", LearnerConfig().align)])
    options.add_argument("--lr", type=float, nargs="+", default=[tiny.lr])
    options.add_argument("--baseline-lr", type=float, nargs="+", help="of data parallel; default: the same")
    options.add_argument("--model", choices=MODELS, nargs="+", default=["recipe"])
    options.add_argument("--text-mb", type=float, nargs="+", default=[tiny.text_mb], help="megabytes of text")
    options.add_argument("--optimizer", choices=("adamw", "muon"), nargs="+", default=["adamw"])
    options.add_argument("--batch-size", type=int, nargs="+", default=[tiny.batch_size])
    options.add_argument("--learners", type=int, nargs="+", default=[2])
    options.add_argument("--steps", type=int, nargs="+", default=[tiny.num_steps])
    options.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--together", type=int, nargs="+", default=[None], help="learners in each round; default: all")
    options.add_argument("--jobs", type=int, default=1, help="processes; each takes one core")
    options.add_argument("--no-data-parallel", action="store_true")
    return options


def _rate(text: str) -> str | float:
    return text if text == "auto" else float(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and store; return 1 if the gap of the defaults exceeds the bound."""
    args = parser().parse_args(argv)
    for text_mb in args.text_mb:  # prepares the data once, before other processes start
        Tiny(args.recipe, data={"max_bytes": round(text_mb * 1e6)}).data  # noqa: B018
    rows = compared(run(args))
    print(summary(rows))
    return int(len(rows) == 1 and any(gap > BOUND for gap in rows[0]["gaps"]))


if __name__ == "__main__":
    raise SystemExit(main())
