"""A learner with a Trainer, in one process or several. Each rank writes its final values to OUT.<rank>.json.

With --paced, a step begins only when all exchanges of the last step have landed. The times of exchanges then do not
depend on the clock, and runs can be compared number by number. With --go, this also holds for runs of several learners,
see in_step.py.
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
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.strategy.trainer.lr_schedules import FleetTokenLR
from tests.e2e.in_step import InStep
from tests.e2e.spread import spread
from tests.quiet import QUIET

NUM_SAMPLES, WIDTH = 384, 8
HIDDEN = 34  # half of it is odd, and so are the parts of the last layer
RATE = 0.05
PACE_S = 180.0


def decayed(step: int) -> float:
    """Return the factor of the learning rate by steps."""
    return 8 / (8 + step)


def decayed_by_tokens(tokens: int) -> float:
    """Return the factor of the learning rate by the tokens of the fleet."""
    return 1 / (1 + tokens)


def is_wrapped(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Return True for the first layer, so that FSDP leaves the last layer to the root."""
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
    """Two layers. Each batch has the indices of its samples. The module records the settings of each step."""

    momentum = 0.0
    decays = False
    fails = (-1, -1)  # batch and rank
    stops = ("never", -1, (-1,))  # where to stop: in or after which batch, and on which ranks
    by_tokens = False

    def __init__(self, num_batch: int, shuffles: bool, part: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 7), requires_grad=False)
        self.num_batch, self.shuffles, self.seen = num_batch, shuffles, list[int]()
        self.samples = Subset(samples(), range(part[0], NUM_SAMPLES, part[1]))
        self.val_losses = list[float]()
        self.losses, self.norms, self.rates = list[float](), list[float](), list[float]()
        self.computed_in = set[str]()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        index, x, y = batch
        if (batch_idx, self.trainer.global_rank) == self.fails:
            raise ValueError("bad input on one rank")
        self.seen += index.tolist()
        found = self.layers(x)
        self.computed_in.add(str(found.dtype))
        loss = nn.functional.mse_loss(found, y)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop("batch", batch_idx)

    def on_train_epoch_end(self) -> None:
        self._stop("epoch", self.current_epoch)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self._stop("validation", self.trainer.fit_loop.epoch_loop.batch_idx)

    def _stop(self, *at: Any) -> None:
        where, number, ranks = self.stops
        if at == (where, number) and self.trainer.global_rank in ranks:
            self.trainer.should_stop = True

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates += [group["lr"] for group in optimizer.param_groups]

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip as Lightning does; under FSDP, Lightning refuses, and users call FSDP's own method."""
        if gradient_clip_val is None:
            return
        if isinstance(self.trainer.strategy, FSDPStrategy):
            norm = self.trainer.strategy.model.clip_grad_norm_(gradient_clip_val)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        _, x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.val_losses.append(float(loss))
        self.log("val_loss", loss, sync_dist=False)  # each rank has its own

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=self.momentum)
        if not (self.decays or self.by_tokens):
            return optimizer
        schedule = (
            FleetTokenLR(optimizer, decayed_by_tokens, self.trainer)
            if self.by_tokens
            else torch.optim.lr_scheduler.LambdaLR(optimizer, decayed)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            spread(self.layers, self.device_mesh)

    def train_dataloader(self) -> DataLoader[Any]:
        if self.shuffles:
            return DataLoader(self.samples, batch_size=self._batch_of_rank, shuffle=True)
        return self.val_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        sampler = DistributedSampler(self.samples, shuffle=False, **self._split)
        return DataLoader(self.samples, batch_size=self._batch_of_rank, sampler=sampler)

    @property
    def _split(self) -> dict[str, int]:
        return self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}

    @property
    def _batch_of_rank(self) -> int:
        return self.num_batch // self._split["num_replicas"]


def samples() -> TensorDataset:
    """Return index, input and target."""
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
    return TensorDataset(torch.arange(NUM_SAMPLES), x, torch.sin(3 * x[:, :3]))


class Pace(Callback):
    """Rank 0 waits after each batch until nothing is in transit, or for some time. After one batch, a checkpoint is
    saved.

    When a file appears, all ranks stop.
    """

    def __init__(self, pause_s: float | None, save_at: int, path: Path, stop_file: Path | None) -> None:
        self._pause_s, self._save_at, self._path, self._stop_file = pause_s, save_at, path, stop_file

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._save_at:
            trainer.save_checkpoint(self._path)
        if self._stop_file is not None:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(self._stop_file.exists(), all=False)
        if trainer.is_global_zero:
            time.sleep(self._pause_s) if self._pause_s is not None else self._wait(trainer.strategy._present.link)

    def _wait(self, link: Any) -> None:
        until_s = time.monotonic() + PACE_S
        while not all(
            not f.is_due and not f.is_fetching and (f.staged or (f.outstanding is None and f.offered == f.landed))
            for f in link._machine.fragments
        ):
            assert time.monotonic() < until_s, [str(f) for f in link._machine.fragments]
            time.sleep(0.001)


def _arguments() -> argparse.Namespace:
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
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="of the samples, and of how many")
    parser.add_argument("--go", type=Path, help="the file that lets all learners of a run go on together")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--clip", type=float, help="norm to which gradients are clipped")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--decays", action="store_true", help="the learning rate, by a schedule")
    parser.add_argument("--by-tokens", action="store_true", help="the learning rate, of the fleet")
    parser.add_argument("--stops", nargs="+", help="where, at which one of these, and the ranks that stop training")
    parser.add_argument("--early", type=float, help="validation loss of a rank that is low enough")
    parser.add_argument("--fails", nargs=2, type=int, default=(-1, -1), help="batch and rank that meet bad input")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s")
    print("rank", os.environ.get("LOCAL_RANK", "0"), "is process", os.getpid(), flush=True)
    options = {"sync_every": 4, "num_fragments": 2, "overlap": 1, **json.loads(given.options)}
    strategy = DecoupledDiLoCoStrategy(INNER[given.inner](), **options)
    pause_s, checkpoint = None if given.paced else given.pause_s, given.out.with_suffix(".ckpt")
    pace = Pace(pause_s, given.save_at, checkpoint, given.stop_file)
    early = [] if given.early is None else [EarlyStopping("val_loss", stopping_threshold=given.early)]
    in_step = [] if given.go is None else [InStep(given.go)]
    trainer = L.Trainer(
        accelerator=given.accelerator,
        devices=given.devices,
        strategy=strategy,
        max_steps=given.steps,
        val_check_interval=5,
        limit_val_batches=int(given.paced and given.go is None),
        accumulate_grad_batches=given.accumulate,
        gradient_clip_val=given.clip,
        precision=given.precision,
        callbacks=[pace, *early, *in_step],
        default_root_dir=given.out.parent,
        **QUIET,
    )
    model = Regression(num_batch=8, shuffles=not given.paced, part=tuple(given.part))
    model.momentum, model.decays, model.fails = given.momentum, given.decays, tuple(given.fails)
    model.by_tokens = given.by_tokens
    if given.stops:
        where, number, *ranks = given.stops
        model.stops = (where, int(number), tuple(map(int, ranks)))
    trainer.fit(model, ckpt_path=given.ckpt)
    held = {
        "strategy": type(strategy).__name__,
        "params": _params(trainer, model),
        "seen": model.seen,
        "val_losses": model.val_losses,
        "steps": trainer.global_step,
        "losses": model.losses,
        "norms": model.norms,
        "rates": model.rates,
        "computed_in": sorted(model.computed_in),
    }
    Path(f"{given.out}.{trainer.global_rank}.json").write_text(json.dumps(held))


def _params(trainer: L.Trainer, model: nn.Module) -> dict[str, list[float]]:
    with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
        named = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}
        wholes = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}
        return {name: p.flatten().tolist() for name, p in wholes.items()}


if __name__ == "__main__":
    main()
