"""Chips of TorchTPU for a Trainer (unmeasured: this has run on a stand-in only, never on a TPU).

`Trainer(accelerator=TorchTPUAccelerator())` is `Trainer(accelerator="torch_tpu")`. See `recipes/tpus.md`.
"""

from __future__ import annotations

from lightning_diloco.strategy.backends.torch_accelerator import TorchTPUAccelerator

__all__ = ["TorchTPUAccelerator"]
