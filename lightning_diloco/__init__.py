"""Decoupled DiLoCo for PyTorch Lightning: `Trainer(strategy="decoupled_diloco")`."""

from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy
from lightning_diloco.strategy.registration import register

__version__ = "0.1.0"
__all__ = ["DecoupledDiLoCoStrategy", "__version__"]

register()
