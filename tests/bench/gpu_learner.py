"""A learner of the gpu bench: a Trainer on an accelerator or the CPU, with or without the strategy.

It trains until a file `end` appears in its folder. It writes there the ends of its steps (StepClock), the time of the
strategy's hooks (HookClock), its peak of device memory (NOTES), and a trace of some steps (TRACE) if it is asked to.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.cli.faults.step_log import StepClock
from tests.bench.idle_learner import EndWith
from tests.bench.landing_clock import LandingClock
from tests.bench.stack import CONTROL, END, NOTES, WITHOUT, Ahead, Stack, options
from tests.bench.timed_recipe import HookClock
from tests.quiet import QUIET

TRACE, TRACED = "trace.json.gz", 6  # file, and steps in it


def wait_for_gpu() -> None:
    """Wait until the GPU is idle, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Notes(Callback):
    """Records the peak of device memory, and traces TRACED steps after warm-up.

    Args:
        warm_up: number of steps that are not traced.
        folder: where the files go.
        traces: whether to trace.
    """

    def __init__(self, warm_up: int, folder: Path, *, traces: bool) -> None:
        self._first = warm_up if traces else -1
        self._folder = folder
        self._traced = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._first:
            activity = torch.profiler.ProfilerActivity
            on_gpu = module.device.type == "cuda"
            profile = torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU])
            self._traced.callback(profile.export_chrome_trace, str(self._folder / TRACE))  # called after its exit
            self._traced.enter_context(profile)
        if trainer.global_step == self._first + TRACED:
            self._traced.close()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._traced.close()
        peak = torch.cuda.max_memory_allocated() if module.device.type == "cuda" else None
        numel = sum(param.numel() for param in module.parameters())
        self._folder.joinpath(NOTES).write_text(json.dumps({"peak": peak, "numel": numel}))


class PartOfGpu(Callback):
    """Limits a learner to a part of the GPU's memory; writes its peak there, and its validation losses.

    Args:
        share: the part, 0..1.
        folder: folder of the file, which is named after the process.
    """

    def __init__(self, share: float, folder: str) -> None:
        self._share, self._folder = share, Path(folder)
        self._losses: list[float] = []

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if (device := trainer.strategy.root_device).type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self._share, device)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._losses.append(float(trainer.callback_metrics["val/loss"]))
        peak = torch.cuda.max_memory_reserved() if module.device.type == "cuda" else None
        found = {"share": self._share, "peak": peak, "losses": self._losses}
        self._folder.joinpath(f"{os.getpid()}.json").write_text(json.dumps(found))


def main() -> None:
    """Train."""
    parser = options(__doc__)
    parser.add_argument("--accelerator", required=True)
    parser.add_argument("--traces", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    HookClock(given.root).attach()
    torch.manual_seed(0)
    batches = torch.randn(8, given.batch, given.width)
    if given.accelerator == "cuda":
        batches = batches.pin_memory()
    trainer = L.Trainer(
        accelerator=given.accelerator,
        devices=1,
        precision="bf16-mixed",
        strategy="auto" if given.mode == WITHOUT else DecoupledDiLoCoStrategy(checkpoint_every=0),
        max_epochs=-1,
        callbacks=[
            Ahead(wait_for_gpu if given.mode == CONTROL else None),
            EndWith(given.root / END),
            Notes(given.warm_up, given.root, traces=given.traces),
            LandingClock(given.root),
            StepClock(),
        ],
        default_root_dir=given.root,
        **QUIET,
    )
    trainer.fit(Stack(given.width, given.depth), DataLoader(TensorDataset(batches), batch_size=None))


if __name__ == "__main__":
    main()
