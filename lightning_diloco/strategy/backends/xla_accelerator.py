"""`Trainer(accelerator="xla")`: whatever PJRT_DEVICE names, where Lightning's "tpu" is TPUs only.

Source: Lightning's XLAAccelerator counts TPU chips by asking the cloud; PJRT knows its devices itself.
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
        """Whether torch_xla is installed; what is wrong with it is said when it is used."""
        return _version("torch_xla") is not None

    @staticmethod
    def auto_device_count() -> int:
        """All devices of this process."""
        from lightning_diloco.devices.xla import ops as xla

        return xla.num_local_devices()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int | list[int]:
        """One device, all of them, or one by its index.

        Raises:
            ConfigError: anything else.
        """
        count = PjrtAccelerator.auto_device_count()
        wanted = _numbers(devices)
        if wanted in (1, count) or (isinstance(wanted, list) and len(wanted) == 1 and 0 <= wanted[0] < count):
            return wanted
        raise ConfigError(
            f"devices={devices!r}: this process has {count} XLA device(s), and a learner can have 1, all {count}, or "
            f"one by its index, [0]..[{count - 1}]; change Trainer(devices=...)"
        )

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        """The devices that `parse_devices` allowed."""
        return [torch.device("xla", k) for k in (range(devices) if isinstance(devices, int) else devices)]

    @staticmethod
    def name() -> str:
        """The name in `Trainer(accelerator=...)`."""
        return NAME


def check_environment(*, needs_platform: bool) -> None:
    """Look at what is installed before torch_xla is imported, which fails in unreadable ways.

    Args:
        needs_platform: PJRT_DEVICE must be set: without it, torch_xla takes what it finds.

    Raises:
        ConfigError: torch_xla is missing, fits another torch, or PJRT_DEVICE is unset; all problems at once.
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


def _numbers(devices: int | str | list[int]) -> int | list[int] | None:
    """What a Trainer accepts as `devices`, as numbers; None if it is something else."""
    if not isinstance(devices, str):
        return devices
    try:
        numbers = [int(number) for number in devices.split(",") if number.strip()]
    except ValueError:
        return None
    return numbers if "," in devices else (numbers[0] if numbers else None)
