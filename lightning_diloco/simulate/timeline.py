"""Simulated time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush


class Timeline:
    """Calls at times of simulated time, in order; calls of the same time run in the order in which they were added.

    Attributes:
        now_s: current simulated time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call a function after this time."""
        heappush(self._calls, (self.now_s + delay_s, next(self._order), call))

    @property
    def next_s(self) -> float | None:
        """Time of the next call; None if there is none."""
        return self._calls[0][0] if self._calls else None

    def run_until(self, until_s: float) -> None:
        """Make all calls up to this time, and set the current time to it."""
        calls = self._calls
        while calls and calls[0][0] <= until_s:
            self.now_s, _, call = heappop(calls)
            call()
        self.now_s = until_s
