"""Decoupled DiLoCo for PyTorch Lightning: `Trainer(strategy="decoupled_diloco")`.

Importing this package registers the strategy's name, before or after Lightning is imported. It does not import
Lightning, which the command line and the syncer do not need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_diloco.pytorch_lightning import MADE_IN, package
from lightning_diloco.strategy.registration import register

if TYPE_CHECKING:
    from lightning_diloco.runs import export_run, plan_run, run_history
    from lightning_diloco.strategy.anchor import load_anchor
    from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy
    from lightning_diloco.strategy.trainer.lr_schedules import FleetTokenLR

__version__ = "0.1.0"
__all__ = [
    "DecoupledDiLoCoStrategy",
    "FleetTokenLR",
    "__version__",
    "export_run",
    "load_anchor",
    "plan_run",
    "run_history",
]
_IN_RUNS = ("export_run", "plan_run", "run_history")

register()


def __getattr__(name: str) -> object:
    if name in _IN_RUNS:
        return getattr(import_module("lightning_diloco.runs"), name)
    if name not in MADE_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{package()}.{MADE_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
