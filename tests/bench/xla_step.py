"""What the strategy costs an inner step on an XLA device: the same Trainer with and without it, a fragment every step.

PJRT_DEVICE=CPU python -m tests.bench.xla_step [--shared]

1. A fragment every step is what the package's defaults do: sync_every=24, so 24 fragments.
2. Steps are timed from one batch's start to the next one's, after warm-up. Modes alternate, and each run's median step
   is compared with that of the run without beside it: what else the machine does changes slowly. The speed is the
   median of these pairs. The clock stands still while other programs have the device's core; "wall" is the wall's.
3. The control waits for the device in every hook: the same check must fail there.
4. PJRT's CPU device has cores of its own, in all modes alike (cores.py). With --shared it has not: the link's threads
   and the syncer take its cores then, as they would not take a TPU's. What each of them computed in a step is told.
5. torch_xla hands a graph to PJRT's CPU device when the one before has been computed. So the first sync of a hook waits
   for the step, and the next step is traced while the device has nothing to do; without the strategy it is traced
   beside the step. On such a device tracing is part of the strategy's cost, whatever cores there are.
6. What an exchange costs the host is some milliseconds, however long a step is. The default batch makes steps of half a
   second: its rows are a quarter of the tokens that one GPU of the 12B recipes has in a step. `--batch 1024` shows what
   steps lose that are shorter than any recipe's.
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
import torch_xla.core.xla_model as xm
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceXLAStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.devices import xla
from tests.bench import report
from tests.bench.cores import Cores

SPEED = 0.97
MODES = ("without", "with", "control")


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
    """Notes when batches start, how long hooks take, what computes, and how many graphs there are.

    Args:
        cores: who computes where.
        warm_up: steps before anything counts.
        waits: whether hooks wait for the device.
    """

    def __init__(self, cores: Cores, warm_up: int, *, waits: bool) -> None:
        self.cores, self.warm_up, self.waits = cores, warm_up, waits
        self.starts_s: list[float] = []
        self.starts_wall_s: list[float] = []
        self.hooks_s: list[float] = []
        self.compilations: list[int] = []
        self.computed_s: list[dict[str, float]] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.link = getattr(trainer.strategy, "_link", None)
        if self.link is None:
            return
        step = self.link.step

        def timed(*args: Any) -> None:
            began_s = time.perf_counter()
            step(*args)
            if self.waits:
                xm.wait_device_ops()
            self.hooks_s.append(time.perf_counter() - began_s)

        self.link.step = timed

    def on_train_batch_start(self, *_: Any) -> None:
        if len(self.starts_s) == self.warm_up:
            self._note_computed()
        self.starts_s.append(self.cores.now_s())
        self.starts_wall_s.append(time.perf_counter())
        self.compilations.append(xla.num_compilations())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            xm.wait_device_ops()
            self._note_computed()

    def _note_computed(self) -> None:
        self.computed_s.append(self.cores.computed_s(self.link and self.link._embedded._process.pid))

    def figures(self) -> dict[str, float]:
        """The run in figures."""
        hooks_s, num_steps = self.hooks_s[self.warm_up :], len(self.starts_s) - self.warm_up
        found = {
            f"{name} p50 [ms]": 1e3 * statistics.median(b - a for a, b in pairwise(starts_s[self.warm_up :]))
            for name, starts_s in (("step", self.starts_s), ("wall", self.starts_wall_s))
        }
        for share in (0.5, 0.95):
            found[f"hook p{round(100 * share)} [ms]"] = 1e3 * report.quantile(hooks_s, share) if hooks_s else 0.0
        before, after = self.computed_s
        found |= {f"{part} CPU [ms]": 1e3 * (after[part] - before[part]) / num_steps for part in before}
        found["graphs after warm-up"] = float(self.compilations[-1] - self.compilations[self.warm_up])
        return found


def fit(args: argparse.Namespace, cores: Cores, mode: str) -> dict[str, float]:
    """One run."""
    torch.manual_seed(0)
    samples = torch.randn(args.batch * 8, args.width)
    clock = Clock(cores, args.warm_up, waits=mode == "control")
    ours = DecoupledDiLoCoStrategy(anchor_device=args.anchor_device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="xla",
            devices=1,
            strategy=SingleDeviceXLAStrategy(device=0) if mode == "without" else ours,
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
    return clock.figures()


def row_of(mode: str, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the runs of a mode, and its speed beside those without the strategy."""
    pairs = zip(found["without"], found[mode], strict=True)
    speed = statistics.median(plain["step p50 [ms]"] / ours["step p50 [ms]"] for plain, ours in pairs)
    return {"run": mode, **report.median_of(found[mode]), "speed": speed}


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Run; 1 if steps are slower than allowed, the control is not, or something is compiled after warm-up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--anchor-device", choices=("device", "host"), default="device")
    parser.add_argument("--shared", action="store_true", help="the device shares all cores with its host")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=list(MODES[1:]))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    cores = Cores(shared=args.shared)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in ("without", *args.modes)}
    for _ in range(args.runs):
        for mode, runs in found.items():
            runs.append(fit(args, cores, mode))
    rows = {mode: row_of(mode, found) for mode in found}
    checks = {}
    if "with" in rows:
        speed, graphs = rows["with"]["speed"], rows["with"]["graphs after warm-up"]
        checks[f"{speed:.3f} of the speed is left, at least {SPEED}"] = speed >= SPEED
        checks[f"{graphs:.0f} graphs are compiled after warm-up, none"] = graphs == 0
    if "control" in rows:
        speed = rows["control"]["speed"]
        checks[f"hooks that wait leave {speed:.3f}, less than {SPEED}"] = speed < SPEED
    say(report.table(list(rows.values())))
    numel = args.depth * args.width * (args.width + 1)
    say(f"\n{numel / 1e6:.1f}M parameters in 24 fragments, one a step; {cores.text}\n")
    say(report.verdicts(checks))
    report.store(args.out, {"circumstances": report.circumstances(), "rows": list(rows.values()), "checks": checks})
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
