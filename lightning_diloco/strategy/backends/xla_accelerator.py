"""`Trainer(accelerator="xla")`: the devices that PJRT_DEVICE names, whereas Lightning's "tpu" supports TPUs only.

Source: Lightning's XLAAccelerator counts TPU chips by asking the cloud; here, PJRT itself counts its devices.
"""

from __future__ import annotations

import os
from importlib import metadata

import torch
from lightning.pytorch.accelerators import XLAAccelerator

from lightning_diloco.errors import ConfigError

NAME = "xla"


class PjrtAccelerator(XLAAccelerator):
    """Devices of torch_xla's PJRT runtime, of any platform."""

    def __init__(self) -> None:
        check_environment(needs_platform=True)
        super().__init__()

    @staticmethod
    def is_available() -> bool:
        """Return whether torch_xla is installed; `check_environment` reports other problems when it is used."""
        return _version("torch_xla") is not None

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices of this process."""
        from lightning_diloco.devices.xla import ops as xla

        return xla.num_local_devices()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int | list[int]:
        """Return the wanted devices: one device, all of them, or one by its index.

        Raises:
            ConfigError: something else is wanted.
        """
        count = PjrtAccelerator.auto_device_count()
        wanted = numbers_of(devices)
        if wanted in (1, count) or (isinstance(wanted, list) and len(wanted) == 1 and 0 <= wanted[0] < count):
            return wanted
        raise ConfigError(
            f"devices={devices!r}: this process has {count} XLA device(s), and a learner can have 1, all {count}, or "
            f"one by its index, [0]..[{count - 1}]; change Trainer(devices=...)"
        )

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        """Return the devices that `parse_devices` has allowed."""
        return [torch.device("xla", k) for k in (range(devices) if isinstance(devices, int) else devices)]

    @staticmethod
    def name() -> str:
        """Return the name for `Trainer(accelerator=...)`."""
        return NAME


def check_environment(*, needs_platform: bool) -> None:
    """Check the installed packages before torch_xla is imported, because a failing import gives no clear message.

    Args:
        needs_platform: whether PJRT_DEVICE must be set; without it, torch_xla chooses a platform.

    Raises:
        ConfigError: torch_xla is missing or fits another torch, or PJRT_DEVICE is unset; it names all problems.
    """
    plain, xla = _version("torch"), _version("torch_xla")
    problems = []
    if xla is None:
        problems.append("torch_xla is not installed: XLA devices need it; pip install 'lightning-diloco[xla]', on TPU "
                        "VMs 'lightning-diloco[tpu]'")  # fmt: skip
    elif plain is None or plain.split(".")[:2] != xla.split(".")[:2]:
        problems.append(f"torch {plain} and torch_xla {xla} are installed: their first two numbers must be equal; "
                        f"pip install 'torch=={'.'.join(xla.split('.')[:2])}.*'")  # fmt: skip
    if needs_platform and not os.environ.get("PJRT_DEVICE"):
        problems.append("PJRT_DEVICE is not set: it must name the platform; set PJRT_DEVICE=TPU on a TPU VM, "
                        "PJRT_DEVICE=CPU to try XLA without one")  # fmt: skip
    if problems:
        raise ConfigError(problems)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers_of(devices: int | str | list[int]) -> int | list[int] | None:
    """Return a Trainer's `devices` as numbers; None if they are not numbers."""
    if not isinstance(devices, str):
        return devices
    try:
        numbers = [int(number) for number in devices.split(",") if number.strip()]
    except ValueError:
        return None
    return numbers if "," in devices else (numbers[0] if numbers else None)
