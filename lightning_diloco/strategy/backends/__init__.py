"""One final class for each way in which Lightning spreads a model over devices.

To support more of them, add a final class and its line here: the module of this folder, imported when needed, and what
it calls the class. It may be a function that finds the class, if only the devices know.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

Key = str | tuple[str, bool]
ACCELERATOR = "accelerator"

FINAL_CLASSES: dict[Key, tuple[str, str]] = {
    # By the name of Lightning's strategy that the user gives as `inner=`.
    "DDPStrategy": ("ddp", "DDPDiLoCo"),
    "FSDPStrategy": ("fsdp", "FSDPDiLoCo"),
    "ModelParallelStrategy": ("model_parallel", "ModelParallelDiLoCo"),
    # By device type (of those without lines of their own: ACCELERATOR), and whether the learner has several devices.
    ("cpu", False): ("single", "SingleDeviceDiLoCo"),
    (ACCELERATOR, False): ("single", "SingleDeviceDiLoCo"),
    ("cpu", True): ("ddp", "DDPDiLoCo"),
    ("cuda", True): ("ddp", "DDPDiLoCo"),
    ("xla", False): ("xla", "SingleDeviceXLADiLoCo"),
    ("xla", True): ("xla_hosts", "spmd_class"),
}
INNER = tuple(key for key in FINAL_CLASSES if isinstance(key, str))
DEVICES = tuple(key for key in FINAL_CLASSES if isinstance(key, tuple))


def load(key: Key) -> Any:
    """A final class, or the function that finds it."""
    module, name = FINAL_CLASSES[key]
    return getattr(import_module(f"{__name__}.{module}"), name)
