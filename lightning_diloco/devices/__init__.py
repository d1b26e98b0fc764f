"""What a device does for the link: snapshots, encoding, staging, landing. See base.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from lightning_diloco.devices.base import FragmentDevice

__all__ = ["device_for"]


def device_for(device: torch.device) -> Callable[..., FragmentDevice[Any, Any]]:
    """The class that exchanges fragments on this device; built from (plan, params, config, learner).

    Raises:
        ConfigError: no such class.
    """
    if device.type == "cpu":
        from lightning_diloco.devices.cpu import CpuFragments

        return CpuFragments
    if device.type == "cuda":
        from lightning_diloco.devices.cuda import CudaFragments

        return CudaFragments
    if device.type == "xla":
        from lightning_diloco.devices.xla_fragments import XlaFragments

        return XlaFragments
    raise ConfigError(f"device {device}: must be of type cpu, cuda or xla; pass Trainer(accelerator=...) accordingly")
