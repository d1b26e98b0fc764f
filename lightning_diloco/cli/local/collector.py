"""Imports beside the collector of garbage.

All that is imported stays. The collector looks through it again and again while it grows, which is a tenth of the start
of a command; once it has grown, each time takes a learner a quarter of a second. Source: our choice.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """No garbage is looked for while the block lasts, and what is there at its end is never looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
