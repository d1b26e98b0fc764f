"""One final class for each way in which Lightning spreads a model over devices.

To support another way, add a final class and a line in `FINAL_CLASSES`: the module of this folder, which is imported
when it is needed, and the name of the class. The name may also be that of a function that returns the class, if the
choice depends on the devices.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_diloco.devices import is_accelerator

Key = str | tuple[str, bool]
ACCELERATOR = "accelerator"

FINAL_CLASSES: dict[Key, tuple[str, str]] = {
    # By the name of Lightning's strategy that the user gives as `inner=`.
    "DDPStrategy": ("ddp", "DDPDiLoCo"),
    "FSDPStrategy": ("fsdp", "FSDPDiLoCo"),
    "ModelParallelStrategy": ("model_parallel", "ModelParallelDiLoCo"),
    # By device type, and whether the learner has several devices. ACCELERATOR: device types without a line here.
    ("cpu", False): ("single", "SingleDeviceDiLoCo"),
    (ACCELERATOR, False): ("single", "SingleDeviceDiLoCo"),
    ("cpu", True): ("ddp", "DDPDiLoCo"),
    (ACCELERATOR, True): ("ddp", "DDPDiLoCo"),
    ("xla", False): ("xla", "SingleDeviceXLADiLoCo"),
    ("xla", True): ("xla_hosts", "spmd_class"),
}
INNER = tuple(key for key in FINAL_CLASSES if isinstance(key, str))
DEVICES = tuple(key for key in FINAL_CLASSES if isinstance(key, tuple))


def can_be_ranks(kind: str) -> bool:
    """Return whether several devices of this type can be one learner; a machine has one Apple GPU at most."""
    return kind == "cpu" or (is_accelerator(kind) and kind != "mps")


def load(key: Key) -> Any:
    """Return a final class, or the function that returns it."""
    module, name = FINAL_CLASSES[key]
    return getattr(import_module(f"{__name__}.{module}"), name)
