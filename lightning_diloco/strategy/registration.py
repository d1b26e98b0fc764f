"""Registers names for `Trainer(strategy=...)`, "decoupled_diloco", and `Trainer(accelerator=...)`, ACCELERATORS.

Lightning has no entry point for them.

1. A name is added to its registry at once if the registry's module has been imported, and otherwise when it is
   imported. Registration itself does not import Lightning. The strategy is imported only when a Trainer asks for it.
2. The package pytorch_lightning has its own classes and its own registries; see `lightning_diloco.pytorch_lightning`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "decoupled_diloco"
ACCELERATORS = {
    "xla": ("xla_accelerator", "PjrtAccelerator", "PJRT devices"),
    "torch": ("torch_accelerator", "TorchAccelerator", "devices of torch.accelerator"),
    "torch_tpu": ("torch_accelerator", "TorchTPUAccelerator", "chips of TorchTPU, unmeasured"),
}
"""Module of strategy/backends/, class and description by the name for `Trainer(accelerator=...)`."""


def register() -> None:
    """Register the names in all registries, now or when they are imported; idempotent."""
    for module, add in _WHEN_IMPORTED.items():
        if module in sys.modules:
            add(sys.modules[module])
        elif not any(isinstance(finder, _Awaited) and finder.awaits == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _Awaited(module, add))


def _make(package: str, **options: Any) -> Any:
    return importlib.import_module(f"{package}.strategy.decoupled").DecoupledDiLoCoStrategy(**options)


def accelerator(package: str, name: str) -> Any:
    """Return the class of ACCELERATORS with this name; its Lightning must have been imported."""
    module, made, _ = ACCELERATORS[name]
    return getattr(importlib.import_module(f"{package}.strategy.backends.{module}"), made)


def _add_strategy(strategies: ModuleType, package: str) -> None:
    if NAME not in strategies.StrategyRegistry:
        make = partial(_make, package)
        strategies.StrategyRegistry.register(NAME, make, description="Decoupled DiLoCo over any network")


def _add_accelerators(accelerators: ModuleType, package: str) -> None:
    registry = accelerators.AcceleratorRegistry
    for name, (_, _, description) in ACCELERATORS.items():
        if name not in registry:  # it needs the class itself
            registry.register(name, accelerator(package, name), description=description)


_WHEN_IMPORTED: dict[str, Callable[[ModuleType], None]] = {
    f"{lightning}.{module}": partial(add, package=package)
    for lightning, package in (
        ("lightning.pytorch", "lightning_diloco"),
        ("pytorch_lightning", "lightning_diloco.pytorch_lightning"),
    )
    for module, add in (("strategies", _add_strategy), ("accelerators", _add_accelerators))
}


class _Awaited(MetaPathFinder):
    """Waits for the import of one module, and calls `add` with the module after its execution.

    The other finders find the module. This finder removes itself then.
    """

    def __init__(self, awaits: str, add: Callable[[ModuleType], None]) -> None:
        self.awaits, self._add = awaits, add

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.awaits:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            self._add(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
