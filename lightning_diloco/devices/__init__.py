"""Device-specific fragment exchange: snapshots, encoding, staging and landing. See base.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from lightning_diloco.devices.base import FragmentDevice

__all__ = ["device_for"]


def device_for(device: torch.device) -> Callable[..., FragmentDevice[Any, Any]]:
    """Return the `FragmentDevice` class for this device; its constructor takes (plan, params, config, learner).

    Raises:
        ConfigError: no class supports this device type.
    """
    if device.type == "cpu":
        from lightning_diloco.devices.cpu import CpuFragments

        return CpuFragments
    if device.type == "cuda":
        from lightning_diloco.devices.cuda import CudaFragments

        return CudaFragments
    if device.type == "xla":
        from lightning_diloco.devices.xla.fragments import XlaFragments

        return XlaFragments
    raise ConfigError(f"device {device}: must be of type cpu, cuda or xla; pass Trainer(accelerator=...) accordingly")
