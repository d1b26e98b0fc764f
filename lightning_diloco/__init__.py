"""Decoupled DiLoCo for PyTorch Lightning: `Trainer(strategy="decoupled_diloco")`.

Importing this makes the strategy's name known, before or after Lightning is imported, and loads nothing heavy: the
command line and the syncer need no Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_diloco.strategy.registration import register

if TYPE_CHECKING:
    from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy

__version__ = "0.1.0"
__all__ = ["DecoupledDiLoCoStrategy", "__version__"]

register()


def __getattr__(name: str) -> type[DecoupledDiLoCoStrategy]:
    if name != "DecoupledDiLoCoStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy

    return DecoupledDiLoCoStrategy


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
