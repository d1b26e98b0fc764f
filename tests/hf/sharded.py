"""A callback that records how each rank's model is sharded before the first computation."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Noting(Callback):
    """Writes FOLDER/<rank>.json.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        params = list(pl_module.parameters())
        found = {
            "strategy": type(trainer.strategy).__name__,
            "sharded": [type(module).__name__ for module in pl_module.modules() if isinstance(module, FSDPModule)],
            "numel": sum(param.numel() for param in params),
            "local_numel": sum(param.to_local().numel() for param in params if isinstance(param, DTensor)),
        }
        (self._folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))
