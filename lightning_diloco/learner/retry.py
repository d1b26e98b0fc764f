"""Calls at the end of a run, which nobody will make later: those that the network fails are made again for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lightning_diloco.errors import TransportError

AGAIN_S = 0.2

Result = TypeVar("Result")


def retry(call: Callable[[], Result], *, within_s: float) -> Result:
    """Make this call until it is answered.

    Args:
        call: may be made several times.
        within_s: for how long it is made again; one call takes as long as its own deadline.

    Raises:
        TransportError: of the last call.
    """
    until_s = time.monotonic() + within_s
    while True:
        try:
            return call()
        except TransportError:
            if time.monotonic() + AGAIN_S > until_s:
                raise
        time.sleep(AGAIN_S)
