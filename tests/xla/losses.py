"""The losses of 16 steps over some XLA devices, without a link, for each way of reading the data, as JSON.

python -m tests.xla.losses NUM_DEVICES BATCH_SIZE[-shuffled]...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.xla.test_xla_trainer import Line, loader, trainer_for


class Noting(Line):
    """Records every loss."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.losses.append(loss.detach())
        return loss


def trained(num_devices: int, reading: str) -> dict[str, object]:
    """Train; return the strategy and the losses."""
    torch.manual_seed(5)
    model = Noting()
    batch_size, _, shuffled = reading.partition("-")
    data = loader(int(batch_size))
    if shuffled:
        order = list(DistributedSampler(data.dataset, num_replicas=1, rank=0))
        data = DataLoader(data.dataset, batch_size=data.batch_size, sampler=order)
    with tempfile.TemporaryDirectory() as root:
        trainer_for(Path(root), 16, devices=num_devices, fast_dev_run=16).fit(model, data, loader())
    kind = type(model.trainer.strategy).__name__
    return {"strategy": kind, "losses": [float(loss) for loss in model.losses]}


if __name__ == "__main__":
    print(json.dumps({reading: trained(int(sys.argv[1]), reading) for reading in sys.argv[2:]}))
