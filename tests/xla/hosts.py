"""One of two hosts that train as one learner: python -m tests.xla.hosts NUMBER FOLDER.

PJRT's CPU device supports only one process. So each process computes the whole mesh, as if the other's devices were its
own, but reads only the values on its own devices, and loads only its own samples. Real are the launches of graphs and
their order, the assembly and distribution of fragments, the sampler, gloo and the syncer. Computation across processes
is not real.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch_xla.runtime as xr
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_diloco.devices.xla import ops as xla
from lightning_diloco.devices.xla.hosts import XlaHostFragments
from tests.xla.test_xla_trainer import Line, loader, trainer_for

NUM_HOSTS, NUM_DEVICES = 2, 4
NUM_STEPS, SAVED_STEP, VALIDATE_EVERY = 120, 30, 60

mirror = threading.local()


def pretend(number: int) -> None:
    """Make this process one host of several."""
    count, every_shard = NUM_DEVICES // NUM_HOSTS, xla._shards

    def own_shards(tensor):
        sees_all = getattr(mirror, "sees_all", False)
        return every_shard(tensor)[slice(None) if sees_all else slice(number * count, (number + 1) * count)]

    def as_both(method):
        """Fetch values that a host only puts back; the other host does the same."""

        def seeing_all(*args):
            mirror.sees_all = True
            try:
                return method(*args)
            finally:
                mirror.sees_all = False

        return seeing_all

    def upload_samples(tensor):
        if not tensor.dim():
            return xla.upload(tensor)[0]
        parts = [torch.empty_like(tensor) for _ in range(NUM_HOSTS)]
        dist.all_gather(parts, tensor.contiguous())
        return xla.upload(torch.cat(parts), dim=0)[0]

    xr.process_index, xr.process_count = lambda: number, lambda: NUM_HOSTS
    xla._shards, xla.upload_samples = own_shards, upload_samples
    for name in ("show_anchor", "stage"):
        setattr(XlaHostFragments, name, as_both(getattr(XlaHostFragments, name)))


def noting(made: list[list[object]]) -> None:
    """Record the graphs of exchanges, in order."""
    for name in ("adopt", "local", "snapshot", "land"):
        method = getattr(XlaHostFragments, name)

        def noted(self, fragment, *args, name=name, method=method):
            made.append([name, fragment])
            return method(self, fragment, *args)

        setattr(XlaHostFragments, name, noted)


class Watch(Callback):
    """Records the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Line, outputs: dict[str, torch.Tensor], *_: object
    ) -> None:
        self.losses.append(outputs["loss"].detach())


def main(number: int, folder: Path) -> dict[str, object]:
    """Train without a link and with one; write the results."""
    pretend(number)
    torch.manual_seed(5)
    dry = Watch()
    trainer = trainer_for(folder, 16, devices=NUM_DEVICES, fast_dev_run=16, callbacks=[dry])
    trainer.fit(Line(), loader(4), loader(4))

    torch.manual_seed(5)
    model, watch, made = Line(), Watch(), list[list[object]]()
    noting(made)
    saving = ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=SAVED_STEP, save_top_k=-1, filename="{step}")
    options = {"devices": NUM_DEVICES, "enable_checkpointing": True, "val_check_interval": VALIDATE_EVERY}
    trainer = trainer_for(folder, NUM_STEPS, callbacks=[watch, saving], **options)
    trainer.fit(model, loader(4), loader(4))
    return {
        "strategy": type(trainer.strategy).__name__,
        "rank": trainer.global_rank,
        "dry": [float(loss) for loss in dry.losses],
        "losses": [float(loss) for loss in watch.losses],
        "val_losses": model.val_losses,
        "compilations": model.compilations,
        "made": made,
        "params": {name: param.sum().item() for name, param in model.named_parameters()},
    }


if __name__ == "__main__":
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    (folder / f"{number}.json").write_text(json.dumps(main(number, folder)))
