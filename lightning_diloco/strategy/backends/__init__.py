"""One final class for each way in which Lightning spreads a model over devices."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(module: str, name: str) -> type[Any]:
    """A final class; its module is imported only now."""
    found: type[Any] = getattr(import_module(f"{__name__}.{module}"), name)
    return found
