"""Keeps imported objects out of garbage collection.

Imported objects are never freed. Without this, the collector scans them repeatedly during import, which takes a tenth
of a command's start-up time. Later, each full scan takes a learner a quarter of a second. Source: our choice.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """Disable garbage collection in the block, and exempt all objects that exist at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
