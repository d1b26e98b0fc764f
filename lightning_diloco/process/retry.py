"""Calls after network failures: retries, and log messages that do not repeat."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

from lightning_diloco.errors import TransportError

AGAIN_S = 0.2

Result = TypeVar("Result")


def problem_of(error: Exception) -> str:
    """Return a text that is the same for errors of which only the first one should be logged.

    It has no digits, because the text of a network failure holds times.
    """
    return re.sub(r"\d+", "", str(error))


def retry(call: Callable[[], Result], *, within_s: float) -> Result:
    """Repeat a call until it is answered.

    Args:
        call: the call, which may be repeated.
        within_s: seconds in which a new attempt may start; one attempt takes up to its own deadline.

    Raises:
        TransportError: the error of the last attempt.
    """
    until_s = time.monotonic() + within_s
    while True:
        try:
            return call()
        except TransportError:
            if time.monotonic() + AGAIN_S > until_s:
                raise
        time.sleep(AGAIN_S)
