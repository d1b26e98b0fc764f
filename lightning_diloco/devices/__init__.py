"""Device-specific fragment exchange: snapshots, encoding, staging and landing. See base.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_diloco.errors import ConfigError

if TYPE_CHECKING:
    from lightning_diloco.devices.base import FragmentDevice

__all__ = ["device_for", "is_accelerator"]


def device_for(device: torch.device) -> Callable[..., FragmentDevice[Any, Any]]:
    """Return the `FragmentDevice` class for this device; its constructor takes (plan, params, config, learner).

    Raises:
        ConfigError: no class supports this device type.
    """
    if device.type == "cpu":
        from lightning_diloco.devices.cpu import CpuFragments

        return CpuFragments
    if device.type == "xla":
        from lightning_diloco.devices.xla.fragments import XlaFragments

        return XlaFragments
    if is_accelerator(device.type):
        from lightning_diloco.devices.accelerator import AcceleratorFragments

        return AcceleratorFragments
    raise ConfigError(
        f"device {device}: must be of type cpu, xla, or an accelerator that torch has a module for, such as cuda; pass "
        "Trainer(accelerator=...) accordingly"
    )


def is_accelerator(kind: str) -> bool:
    """Return whether torch has a module for devices of this type, other than for cpu and xla, which have their own."""
    try:
        torch.get_device_module(kind)
    except RuntimeError:
        return False
    return kind not in ("cpu", "xla")
