"""A learner of the xla_step bench: a Trainer on an XLA device, with or without the strategy.

It trains until a file `end` appears in its folder. It writes there the ends of its steps (StepClock), the time of the
strategy's hooks (HookClock), and NOTES: CPU times of its threads and the number of graphs compiled after warm-up.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch_xla.core.xla_model as xm
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceXLAStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.cli.faults.step_log import StepClock
from lightning_diloco.devices.xla import ops as xla
from tests.bench.cores import Cores
from tests.bench.idle_learner import EndWith
from tests.bench.landing_clock import LandingClock
from tests.bench.stack import CONTROL, END, NOTES, WITHOUT, Ahead, Stack, options
from tests.bench.timed_recipe import HookClock
from tests.quiet import QUIET


class Notes(Callback):
    """Records CPU times and the number of compiled graphs.

    Args:
        cores: assignment of cores.
        warm_up: number of steps that do not count.
        path: path of the notes.
    """

    def __init__(self, cores: Cores, warm_up: int, path: Path) -> None:
        self._cores, self._warm_up, self._path = cores, warm_up, path
        self._before: tuple[int, dict[str, float]] = (0, {})

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._warm_up:
            self._before = self._now(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.should_stop:
            return
        xm.wait_device_ops()
        (graphs, computed_s), num_steps = self._before, trainer.global_step - self._warm_up
        graphs_now, computed_now_s = self._now(trainer)
        found = {f"{part} CPU [ms]": 1e3 * (computed_now_s[part] - computed_s[part]) / num_steps for part in computed_s}
        self._path.write_text(json.dumps({**found, "graphs after warm-up": graphs_now - graphs}))

    def _now(self, trainer: L.Trainer) -> tuple[int, dict[str, float]]:
        fit = getattr(trainer.strategy, "_fit", None)
        return xla.num_compilations(), self._cores.computed_s(fit and fit.link._whereabouts._embedded._process.pid)


def main() -> None:
    """Train."""
    parser = options(__doc__)
    parser.add_argument("--anchor-device", choices=("device", "host"), required=True)
    parser.add_argument("--shared", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    cores = Cores(shared=given.shared)
    HookClock(given.root).attach()
    torch.manual_seed(0)
    samples = torch.randn(given.batch * 8, given.width)
    ours = DecoupledDiLoCoStrategy(anchor_device=given.anchor_device)
    trainer = L.Trainer(
        accelerator="xla",
        devices=1,
        strategy=SingleDeviceXLAStrategy(device=0) if given.mode == WITHOUT else ours,
        max_epochs=-1,
        callbacks=[
            Ahead(xm.wait_device_ops if given.mode == CONTROL else None),
            EndWith(given.root / END),
            Notes(cores, given.warm_up, given.root / NOTES),
            LandingClock(given.root),
            StepClock(),
        ],
        default_root_dir=given.root,
        **QUIET,
    )
    trainer.fit(Stack(given.width, given.depth), DataLoader(TensorDataset(samples), batch_size=given.batch))


if __name__ == "__main__":
    main()
