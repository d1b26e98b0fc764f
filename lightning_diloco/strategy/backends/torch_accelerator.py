"""`Trainer(accelerator="torch")`: the devices of `torch.accelerator`, also of types for which Lightning has no class.

Examples are Intel GPUs (`xpu`) and back ends that register themselves. Chips of TorchTPU have rules of their own
(`torch_tpu.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from typing_extensions import override

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.xla_accelerator import numbers_of


class TorchAccelerator(Accelerator):
    """Devices of the type that `torch.accelerator` finds on this machine."""

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one of this process.

        Raises:
            ConfigError: the device has another type.
        """
        if device.type != (kind := _kind()):
            raise ConfigError(f"device {device}: must be of type {kind}, the one that torch.accelerator finds here")
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        """Release nothing; memory is released with the tensors."""

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the statistics of the device's memory; empty if its type has none."""
        module = torch.get_device_module(device)
        return dict(module.memory_stats(device)) if hasattr(module, "memory_stats") else {}

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return the indices of the wanted devices. One device is the current one.

        Raises:
            ConfigError: this machine does not have these devices.
        """
        count, wanted = torch.accelerator.device_count(), numbers_of(devices)
        if isinstance(wanted, int):
            number = count if wanted == -1 else wanted
            wanted = [torch.accelerator.current_device_index()] if number == 1 else list(range(number))
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(count)):
            raise ConfigError(
                f"devices={devices!r}: must be a number from 1 to {count}, the number of {_kind()} "
                "devices here, or -1 for all of them, or a list of different indices from 0; change "
                "Trainer(devices=...)"
            )
        return wanted

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the devices with these indices."""
        return [torch.device(_kind(), index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices of this machine."""
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        """Return whether torch finds an accelerator."""
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        """Return the name for `Trainer(accelerator=...)`."""
        return "torch"


class TorchTPUAccelerator(TorchAccelerator):
    """Chips of TorchTPU (`torch_tpu.py`); unmeasured, because it has never run on a TPU."""

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return the index of each rank's chip in its own process, which is 0.

        Raises:
            ConfigError: this machine does not have so many chips, or chips are chosen by index.
        """
        if not isinstance(numbers_of(devices), int):
            raise ConfigError(
                f"devices={devices!r}: must be a number of chips, or -1 for all of them, because each process sees its "
                "own chip only; set TPU_VISIBLE_CHIPS to choose chips of this host"
            )
        return [0] * len(TorchAccelerator.parse_devices(devices))

    @staticmethod
    @override
    def is_available() -> bool:
        """Return whether torch finds a TPU; torch_xla's do not count, see accelerator="xla"."""
        return torch.accelerator.is_available() and _kind() == "tpu"

    @staticmethod
    @override
    def name() -> str:
        """Return the name for `Trainer(accelerator=...)`."""
        return "torch_tpu"


def _kind() -> str:
    found = torch.accelerator.current_accelerator()
    return "none" if found is None else found.type
