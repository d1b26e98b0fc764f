"""Makes `Trainer(strategy="decoupled_diloco")` known. Lightning has no entry point for this: an import is needed.

1. As soon as a registry of strategies exists, the name is in it: at once if Lightning is imported already, else while
   it is being imported. Nothing is imported for that; the strategy itself is when a Trainer asks for it.
2. The package pytorch_lightning has classes and a registry of its own, which take our strategy for a stranger: there
   the name leads to an error that says so.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from lightning_diloco.errors import ConfigError

NAME = "decoupled_diloco"


def register() -> None:
    """Register the name wherever strategies are, or will be; calling it again changes nothing."""
    for module, make in _REGISTRIES.items():
        if module in sys.modules:
            _add(sys.modules[module], make)
        elif not any(isinstance(finder, _Awaited) and finder.awaits == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _Awaited(module, make))


def _make(**options: Any) -> Any:
    from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy

    return DecoupledDiLoCoStrategy(**options)


def _refuse(**options: Any) -> NoReturn:
    raise ConfigError(
        f'Trainer(strategy="{NAME}") of the package pytorch_lightning: only that of `lightning` is supported; '
        "replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl`"
    )


_REGISTRIES = {
    "lightning.pytorch.strategies": _make,
    "pytorch_lightning.strategies": _refuse,
    "lightning.pytorch.accelerators": None,  # Trainer(accelerator="xla")
}


def _add(module: ModuleType, make: Any) -> None:
    if make is None:
        from lightning_diloco.strategy.xla_accelerator import PjrtAccelerator

        if PjrtAccelerator.name() not in module.AcceleratorRegistry:
            module.AcceleratorRegistry.register(PjrtAccelerator.name(), PjrtAccelerator, description="PJRT devices")
    elif NAME not in module.StrategyRegistry:
        module.StrategyRegistry.register(NAME, make, description="Decoupled DiLoCo over any network")


class _Awaited(MetaPathFinder):
    """Lets one module be found as ever, once, and has the name registered when that module has been executed."""

    def __init__(self, awaits: str, make: Any) -> None:
        self.awaits, self._make = awaits, make

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
            _add(module, self._make)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
