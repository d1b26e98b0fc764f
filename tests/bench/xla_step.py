"""What the strategy costs an inner step on an XLA device: the same Trainer with and without it, a fragment every step.

PJRT_DEVICE=CPU python -m tests.bench.xla_step

Steps are timed from one batch's start to the next one's, after warm-up. Runs with and without alternate, and each run's
median step is compared with that of the run beside it: what else the machine does changes slowly. The speed is the
median of these pairs. On PJRT's CPU device the link's own work takes cores from training, which a TPU's host would not:
there, a quiet machine with more than two cores is needed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceXLAStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.devices import xla
from tests.bench import report

SPEED = 0.97
NUM_FRAGMENTS = 4


class Stack(L.LightningModule):
    """Square layers with residuals."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Notes when batches start, how long hooks take, and how many graphs there are."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []
        self.hooks_s: list[float] = []
        self.compilations: list[int] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        link = getattr(trainer.strategy, "_link", None)
        if link is None:
            return
        step = link.step

        def timed(*args: Any) -> None:
            began_s = time.perf_counter()
            step(*args)
            self.hooks_s.append(time.perf_counter() - began_s)

        link.step = timed

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts_s.append(time.perf_counter())
        self.compilations.append(xla.num_compilations())


def fit(args: argparse.Namespace, *, with_it: bool) -> Clock:
    """One run."""
    torch.manual_seed(0)
    samples = torch.randn(args.batch * 8, args.width)
    clock = Clock()
    diloco = DecoupledDiLoCoStrategy(
        sync_every=NUM_FRAGMENTS, num_fragments=NUM_FRAGMENTS, anchor_device=args.anchor_device
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="xla",
            devices=1,
            strategy=diloco if with_it else SingleDeviceXLAStrategy(device=0),
            max_steps=args.steps,
            max_epochs=-1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Stack(args.width, args.depth), DataLoader(TensorDataset(samples), batch_size=args.batch))
    return clock


def figures(clock: Clock, warm_up: int) -> dict[str, float]:
    """One run in figures."""
    starts_s = clock.starts_s[warm_up:]
    found = {"step p50 [ms]": 1e3 * statistics.median(b - a for a, b in pairwise(starts_s))}
    if hooks_s := clock.hooks_s[warm_up:]:
        found["hook p50 [ms]"] = 1e3 * statistics.median(hooks_s)
        found["hook p95 [ms]"] = 1e3 * report.quantile(hooks_s, 0.95)
    found["graphs after warm-up"] = float(clock.compilations[-1] - clock.compilations[warm_up])
    return found


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run; 1 if steps are slower than allowed, or something is compiled after warm-up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=80)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--anchor-device", choices=("device", "host"), default="device")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(args.runs):
        for with_it in (False, True):
            found[with_it].append(figures(fit(args, with_it=with_it), args.warm_up))
    plain, ours = report.median_of(found[False]), report.median_of(found[True])
    pairs = zip(found[False], found[True], strict=True)
    speed = statistics.median(without["step p50 [ms]"] / with_it["step p50 [ms]"] for without, with_it in pairs)
    rows = [{"run": "with", **ours, "speed": speed}, {"run": "without", **plain, "speed": 1.0}]
    say(report.table(rows))
    numel = args.depth * args.width * (args.width + 1)
    say(f"\n{numel / 1e6:.1f}M parameters in {NUM_FRAGMENTS} fragments, one a step; bound: speed >= {SPEED}")
    report.store(args.out, {"circumstances": report.circumstances(), "rows": rows})
    return int(speed < SPEED or ours["graphs after warm-up"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
