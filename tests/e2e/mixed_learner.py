"""A learner of a mixed fleet: on CPUs, on XLA or on a stand-in for an accelerator, in any precision, of any size.

Each rank writes the digests of the anchors that it had at the ends of steps to OUT.<rank>.json, rank 0 by fragment and
version.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.core.digest import digest
from tests.bench.idle_learner import EndWith
from tests.devices import fake_tpu, late
from tests.quiet import QUIET

WIDTH = 16


class Line(L.LightningModule):
    """Learns a fixed linear map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x = batch[0].to(self.layer.weight.dtype)
        return ((self.layer(x) - x.roll(1, 1)) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Anchors(L.Callback):
    """Records digests of anchors."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        fit = trainer.strategy._joined
        if not trainer.is_global_zero:  # it does not know versions
            anchors = map(fit.device.anchor, range(fit.link.plan.num_fragments))
            self.digests |= {found: found for found in map(digest, anchors)}
            return
        for p, fragment in enumerate(fit.link._machine.fragments):
            if fragment.landed and (key := f"{p}:{fragment.landed}") not in self.digests:
                self.digests[key] = digest(fit.device.anchor(p))


def main() -> None:
    """Train until a file appears."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", required=True)
    parser.add_argument("--precision", default="32")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=Path, required=True)
    given = parser.parse_args()
    if given.accelerator == "torch":
        late.register()
    elif given.accelerator == "torch_tpu":
        fake_tpu.load()
    anchors = Anchors()
    trainer = L.Trainer(
        accelerator=given.accelerator,
        devices=given.devices,
        precision=given.precision,
        strategy=DecoupledDiLoCoStrategy(checkpoint_every=0),
        max_epochs=-1,
        callbacks=[EndWith(given.until), anchors],
        default_root_dir=given.out.parent,
        **QUIET,
    )
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    module = Line()
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=given.batch_size))
    found = {
        "digests": anchors.digests,
        "steps": trainer.global_step,
        "device": trainer.strategy.root_device.type,
        "dtype": str(module.layer.weight.dtype),
    }
    given.out.with_suffix(f".{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
