"""Compares LoRA fine-tuning by several learners with data-parallel fine-tuning on the same tokens.

python -m tests.bench.fine_tuning --out recipes/tiny/results/fine_tuning.json

1. The model is trained on the Python standard library first, by one learner, then fine-tuned on other text: C++ headers
   that torch brings along. Only the adapter is trained and exchanged.
2. Learners have the recipe's options and the package's defaults, and exchange every `--sync-every` steps. The first
   value is that of the bound. An adapter is small, so a short period costs little. Both sides have the best learning
   rate of `--lr`, by the mean loss over the seeds.
3. The run is short: 256 steps are ten rounds of each fragment with a period of 24 steps.
4. The control is the model before fine-tuning. Its loss must be much higher, so that a gap means something.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from tests.bench import quality, report
from tests.bench.tiny import Tiny
from tests.bench.trials import outcomes

ADAPTER = {"r": 8, "target_modules": "all-linear"}
TEXT = str(Path(torch.__file__).parent / "include" / "ATen" / "**" / "*.h")
MAX_BYTES = 4_000_000
Arm = tuple[int, int, float]  # period, learners, learning rate
ALONE, TOGETHER = -1, 0  # the "periods" of the model before fine-tuning, and of data parallel
BOUND = 0.006
CONTROL = 0.2
COLUMNS = (
    "learners",
    "sync_every",
    "data parallel",
    "its lr",
    "anchor",
    "anchor's lr",
    "mean gap",
    "worst gap",
    "before",
)


def pretrain(folder: Path, model: str, steps: int) -> None:
    """Train a model and its tokenizer on the recipe's text, and save both."""
    config = Tiny().recipe["model"]["init_args"]["config"] | quality.MODELS[model]
    tiny = Tiny(model={"config": config})
    trainee, batches = tiny.model(0, steps), tiny.batches(0, 0, 1)
    for _ in range(steps):
        trainee.step(next(batches))
    trainee.module.model.save_pretrained(folder)  # type: ignore[union-attr, operator]
    tiny.data.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]


def task(folder: Path, lr: float) -> Tiny:
    """Return the saved model with an adapter, and the other text."""
    model = {"name": str(folder), "config": None, "adapter": ADAPTER, "lr": lr, "warmup_steps": 10}
    return Tiny(model=model, data={"files": TEXT, "tokenizer": str(folder), "max_bytes": MAX_BYTES})


def loss(folder: Path, steps: int, arm: Arm, seed: int) -> float:
    """Return the validation loss of a fine-tuned model, or of the anchor of several learners."""
    every, learners, lr = arm
    tiny = task(folder, lr)
    if every == ALONE:
        return tiny.model(seed, steps).validation_loss()
    if every == TOGETHER:
        return quality.data_parallel(tiny, learners=learners, steps=steps, seed=seed)
    num_fragments = min(every, tiny.strategy["num_fragments"])
    options = {**tiny.strategy, "sync_every": every, "num_fragments": num_fragments}
    config = RunConfig.with_defaults(options).validate()
    found = quality.decoupled(tiny, config, LearnerConfig(), learners=learners, steps=steps, seed=seed)
    return float(found["loss"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print and store the results; return 1 if a gap exceeds the bound."""
    parser = report.options(__doc__)
    parser.add_argument("--model", choices=quality.MODELS, default="recipe")
    parser.add_argument("--pretraining-steps", type=int, default=1440)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--learners", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sync-every", type=int, nargs="+", default=[Tiny().strategy["sync_every"], 4])
    parser.add_argument("--lr", type=float, nargs="+", default=[1.6e-2, 3.2e-2, 6.4e-2])
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="processes; each takes one core")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="diloco-fine-tuning-") as name:
        folder = Path(name)
        pretrain(folder, args.model, args.pretraining_steps)
        arms = list(itertools.product((TOGETHER, *args.sync_every), args.learners, args.lr))
        wanted: list[Arm] = [(ALONE, 1, args.lr[0]), *arms]
        trials = [partial(loss, folder, args.steps, arm, seed) for arm in wanted for seed in args.seed]
        losses = iter(outcomes(trials, args.jobs))
        found = {arm: [next(losses) for _ in args.seed] for arm in wanted}
    (before, *_) = found.pop(wanted[0])
    rows = [_row(m, every, found, args.lr, before) for m in args.learners for every in args.sync_every]
    checks = {
        f"M = {row['learners']}: {row['mean gap']} against data parallel, at most {BOUND:+.1%}": row["gap"] <= BOUND
        for row in rows
        if row["sync_every"] == args.sync_every[0]
    }
    least = min(before / row["data parallel"] - 1 for row in rows)
    checks[f"control: without fine-tuning the loss is {least:+.0%} higher"] = least > CONTROL
    stored = [{"arm": list(arm), "losses": values} for arm, values in found.items()]
    return report.conclude(args.out, rows, checks, columns=COLUMNS, trials=stored, model=args.model)


def _row(learners: int, every: int, found: dict[Arm, list[float]], lrs: Sequence[float], before: float) -> report.Row:
    best = {
        period: min(lrs, key=lambda lr, period=period: statistics.mean(found[period, learners, lr]))  # type: ignore[misc]
        for period in (TOGETHER, every)
    }
    theirs, ours = (found[period, learners, best[period]] for period in (TOGETHER, every))
    gaps = [mine / other - 1 for mine, other in zip(ours, theirs, strict=True)]
    return {
        "learners": learners,
        "sync_every": every,
        "data parallel": round(statistics.mean(theirs), 4),
        "its lr": best[TOGETHER],
        "anchor": round(statistics.mean(ours), 4),
        "anchor's lr": best[every],
        "mean gap": f"{statistics.mean(gaps):+.2%}",
        "worst gap": f"{max(gaps):+.2%}",
        "before": round(before, 4),
        "gap": statistics.mean(gaps),
    }


if __name__ == "__main__":
    raise SystemExit(main())
