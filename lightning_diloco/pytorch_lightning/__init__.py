"""The strategy for code that says `import pytorch_lightning as pl`.

The packages `lightning` and `pytorch_lightning` have the same source under two names. Their classes are different ones,
and a Trainer accepts a strategy of its own package only. So `lightning_diloco.pytorch_lightning.strategy` is
`lightning_diloco.strategy`, compiled from the same files with the other package's names in place of `lightning`'s.

1. `Trainer(strategy="decoupled_diloco")` gets the strategy of its own package, and so it is with accelerators.
   `lightning_diloco.DecoupledDiLoCoStrategy` is that of pytorch_lightning if pytorch_lightning is imported and
   `lightning.pytorch` is not. Otherwise it is that of lightning.
   `lightning_diloco.pytorch_lightning.DecoupledDiLoCoStrategy` is always that of pytorch_lightning.
2. The layers below the strategy (learner, protocol, ...) import neither package and are shared, so learners of both
   kinds can take part in one run. Modules and data of `lightning_diloco.hf`, and recipes, are for `lightning`.
3. A module is compiled when it is first imported. Nothing is written to disk.

Source: how Lightning itself makes its second package.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

_OTHER_NAMES = {
    r"\blightning_diloco\.(strategy|tracking)\b": rf"{__name__}.\1",
    r"\blightning\.pytorch\b": "pytorch_lightning",
    r"\blightning\.fabric\b": "lightning_fabric",
}
_MIRRORED = re.compile(rf"{re.escape(__name__)}\.((?:strategy|tracking)(?:\.\w+)*)")
MADE_IN = {
    "DecoupledDiLoCoStrategy": "strategy.decoupled",
    "FleetTokenLR": "strategy.trainer.lr_schedules",
    "load_anchor": "strategy.anchor",
}
__all__ = ["DecoupledDiLoCoStrategy", "FleetTokenLR", "load_anchor"]


def package() -> str:
    """Return the package whose strategy `lightning_diloco.DecoupledDiLoCoStrategy` is: this package or its parent."""
    is_other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return __name__ if is_other else __name__.rpartition(".")[0]


def renamed(source: str) -> str:
    """Return a module's source with the names of the other package."""
    for name, other in _OTHER_NAMES.items():
        source = re.sub(name, other, source)
    return source


def __getattr__(name: str) -> object:
    if name not in MADE_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MADE_IN[name]}"), name)


class _Mirror(MetaPathFinder):
    """Finds the modules that are compiled a second time, for pytorch_lightning."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if (found := _MIRRORED.fullmatch(name)) is None:
            return None
        origin = importlib.util.find_spec(f"lightning_diloco.{found[1]}")
        if origin is None or origin.origin is None:
            return None
        spec = importlib.util.spec_from_file_location(name, origin.origin, loader=_Renaming(name, origin.origin))
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations.clear()  # else Python would find the original files in it
        return spec


class _Renaming(SourceFileLoader):
    """Compiles a module with the names of the other package."""

    def get_code(self, fullname: str) -> CodeType:
        return compile(renamed(self.get_data(self.path).decode()), self.path, "exec", dont_inherit=True)


if not any(type(finder).__qualname__ == _Mirror.__qualname__ for finder in sys.meta_path):
    sys.meta_path.append(_Mirror())
