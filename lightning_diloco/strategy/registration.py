"""Makes `Trainer(strategy="decoupled_diloco")` known. Lightning has no entry point for this: an import is needed."""

from __future__ import annotations

import sys

from lightning.pytorch.strategies import StrategyRegistry

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.decoupled import DecoupledDiLoCoStrategy

NAME = "decoupled_diloco"


def register() -> None:
    """Register the name; calling it again changes nothing."""
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, DecoupledDiLoCoStrategy, description="Decoupled DiLoCo over any network")
    # The package pytorch_lightning has classes and a registry of its own, which take our strategy for a stranger.
    other = getattr(sys.modules.get("pytorch_lightning.strategies"), "StrategyRegistry", None)
    if other is not None and NAME not in other:
        other.register(NAME, _refuse_other_package)


def _refuse_other_package() -> None:
    raise ConfigError(
        f'Trainer(strategy="{NAME}") of the package pytorch_lightning: only that of `lightning` is supported; '
        "replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl`"
    )
