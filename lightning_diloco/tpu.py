"""Chips of TorchTPU for a Trainer (unmeasured: this has run on a stand-in only, never on a TPU).

`Trainer(accelerator=TorchTPUAccelerator())` is `Trainer(accelerator="torch_tpu")`. See `recipes/tpus.md`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning_diloco.pytorch_lightning import package
from lightning_diloco.strategy.registration import accelerator

if TYPE_CHECKING:
    from lightning_diloco.strategy.backends.torch_accelerator import TorchTPUAccelerator
else:
    if package() == "lightning_diloco":  # otherwise pytorch_lightning has been imported
        importlib.import_module("lightning.pytorch")  # first, because it registers the class while it is imported
    TorchTPUAccelerator = accelerator(package(), "torch_tpu")

__all__ = ["TorchTPUAccelerator"]
