"""A learner as a Trainer, in one process or several. Each rank writes what it held at the end to OUT.<rank>.json.

With --paced, a step begins only when everything of the last one has landed: then what is exchanged when does not depend
on the clock, and runs can be compared number by number.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_diloco import DecoupledDiLoCoStrategy

NUM_SAMPLES, WIDTH = 384, 8
HIDDEN = 34  # halves of it are odd, and so are the parts of the last layer
PACE_S = 20.0


def is_wrapped(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Of FSDP: the first layer is, so that the last belongs to the root."""
    return recurse or (isinstance(module, nn.Linear) and module.in_features == WIDTH)


INNER = {
    "auto": lambda: "auto",
    "spawn": lambda: DDPStrategy(start_method="spawn"),
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy=is_wrapped),
    "fsdp-sharded": lambda: FSDPStrategy(auto_wrap_policy=is_wrapped, state_dict_type="sharded"),
    "fsdp2": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
    "fsdp2-sharded": lambda: ModelParallelStrategy(2, 1),
    "tp": lambda: ModelParallelStrategy(1, 2, save_distributed_checkpoint=False),
    "fsdp2-tp": lambda: ModelParallelStrategy(2, 2, save_distributed_checkpoint=False),
}


class Regression(L.LightningModule):
    """Two layers; every batch says which samples it holds."""

    momentum = 0.0

    def __init__(self, num_batch: int, shuffles: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 7), requires_grad=False)
        self.num_batch, self.shuffles, self.seen = num_batch, shuffles, list[int]()
        self.val_losses = list[float]()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        index, x, y = batch
        self.seen += index.tolist()
        return nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        _, x, y = batch
        self.val_losses.append(float(nn.functional.mse_loss(self.layers(x), y)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.layers, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if data.size() > 1:
            for layer in (self.layers[0], self.layers):
                fully_shard(layer, mesh=data)

    def train_dataloader(self) -> DataLoader[Any]:
        if self.shuffles:
            return DataLoader(samples(), batch_size=self._batch_of_rank, shuffle=True)
        return self.val_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        sampler = DistributedSampler(samples(), shuffle=False, **self._split)
        return DataLoader(samples(), batch_size=self._batch_of_rank, sampler=sampler)

    @property
    def _split(self) -> dict[str, int]:
        return self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}

    @property
    def _batch_of_rank(self) -> int:
        return self.num_batch // self._split["num_replicas"]


def samples() -> TensorDataset:
    """Index, input and target."""
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
    return TensorDataset(torch.arange(NUM_SAMPLES), x, torch.sin(3 * x[:, :3]))


class Pace(Callback):
    """Rank 0 waits after each batch: until nothing is under way, or for some time. After one, a checkpoint is saved.

    Once a file is there, all ranks stop.
    """

    def __init__(self, pause_s: float | None, save_at: int, path: Path, stop_file: Path | None) -> None:
        self._pause_s, self._save_at, self._path, self._stop_file = pause_s, save_at, path, stop_file

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._save_at:
            trainer.save_checkpoint(self._path)
        if self._stop_file is not None:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(self._stop_file.exists(), all=False)
        if trainer.is_global_zero:
            time.sleep(self._pause_s) if self._pause_s is not None else self._wait(trainer.strategy._link)

    def _wait(self, link: Any) -> None:
        until_s = time.monotonic() + PACE_S
        while not all(
            not f.is_due and not f.is_fetching and (f.staged or (f.outstanding is None and f.offered == f.landed))
            for f in link._machine.fragments
        ):
            assert time.monotonic() < until_s, [str(f) for f in link._machine.fragments]
            time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--inner", choices=INNER, default="auto")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--options", default="{}", help="of the strategy, JSON")
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--save-at", type=int, default=-1, help="step after which a checkpoint is saved")
    parser.add_argument("--momentum", type=float, default=0.0, help="so that the optimizer has a state")
    parser.add_argument("--ckpt", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--stop-file", type=Path, help="once it is there, training stops")
    parser.add_argument("--pause-s", type=float, default=0.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s")
    print("rank", os.environ.get("LOCAL_RANK", "0"), "is process", os.getpid(), flush=True)
    options = {"sync_every": 4, "num_fragments": 2, "overlap": 1, **json.loads(given.options)}
    strategy = DecoupledDiLoCoStrategy(INNER[given.inner](), **options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy=strategy,
        max_steps=given.steps,
        val_check_interval=5,
        limit_val_batches=int(given.paced),
        callbacks=Pace(
            None if given.paced else given.pause_s, given.save_at, given.out.with_suffix(".ckpt"), given.stop_file
        ),
        default_root_dir=given.out.parent,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression(num_batch=8, shuffles=not given.paced)
    model.momentum = given.momentum
    trainer.fit(model, ckpt_path=given.ckpt)
    held = {
        "strategy": type(strategy).__name__,
        "params": _params(trainer, model),
        "seen": model.seen,
        "val_losses": model.val_losses,
        "steps": trainer.global_step,
    }
    Path(f"{given.out}.{trainer.global_rank}.json").write_text(json.dumps(held))


def _params(trainer: L.Trainer, model: nn.Module) -> dict[str, list[float]]:
    with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
        named = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}
        wholes = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}
        return {name: p.flatten().tolist() for name, p in wholes.items()}


if __name__ == "__main__":
    main()
