"""A learner on chips of the stand-in for TorchTPU (`tests/devices/fake_tpu.py`); each rank writes its results.

`python -m tests.strategy.backends.chips_trainer --devices 2 --steps 100`, in a separate folder.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from lightning_diloco import DecoupledDiLoCoStrategy
from tests.devices import fake_tpu
from tests.quiet import QUIET

INNER: dict[str, Any] = {
    "auto": lambda: "auto",
    "spawn": lambda: DDPStrategy(start_method="spawn"),
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}


class Times(torch.nn.Module):
    """Multiplies each column by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin with ones."""
        torch.nn.init.ones_(self.factors)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the products."""
        return batch * self.factors


class Scale(L.LightningModule):
    """Learns to multiply by three. Each rank reads different numbers."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.is_sharded = is_sharded

    def configure_model(self) -> None:
        """Build sharded layers on the meta device, because a parameter of this device cannot change its memory."""
        if hasattr(self, "net"):
            return
        with torch.device("meta" if self.is_sharded else "cpu"):
            self.net = Times()
        if self.is_sharded:
            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Squared error."""
        return ((self.net(batch) - 3 * batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        """Record the process id."""
        if self.global_step == 20:
            Path(f"training-{self.global_rank}").write_text(str(os.getpid()))


def main() -> None:
    """Train, and write the factors that `fit` leaves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--inner", choices=INNER, default="auto")
    parser.add_argument("--touch", action="store_true", help="use a chip before the Trainer starts the ranks")
    given = parser.parse_args()
    fake_tpu.load()
    # FSDP2 frees and allocates memory of gathered parameters, which tensors of the stand-in cannot do.
    _fsdp_param.alloc_storage = _fsdp_param.free_storage = lambda tensor: None
    if given.touch:
        torch.ones(1, device="tpu")
    trainer = L.Trainer(
        accelerator="torch_tpu", devices=given.devices, max_steps=given.steps, default_root_dir=".",
        strategy=DecoupledDiLoCoStrategy(INNER[given.inner](), sync_every=4), **QUIET,
    )  # fmt: skip
    module = Scale(given.inner == "fsdp2")
    samples = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=8))
    (factors,) = module.parameters()
    found = {
        "factors": (factors.to_local() if isinstance(factors, DTensor) else factors).detach().cpu().tolist(),
        "final class": type(trainer.strategy).__name__,
        "is sharded": isinstance(module.net, FSDPModule),
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
    }
    Path(f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
