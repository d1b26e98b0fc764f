"""Simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    """Calls at moments of simulated time, in order; those of one moment in the order in which they were added.

    Attributes:
        now_s: the present moment.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call a function after this time."""
        heapq.heappush(self._calls, (self.now_s + delay_s, next(self._order), call))

    @property
    def next_s(self) -> float | None:
        """The moment of the next call; None if there is none."""
        return self._calls[0][0] if self._calls else None

    def run_until(self, until_s: float) -> None:
        """Make all calls up to this moment, which then is the present one."""
        while self._calls and self._calls[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._calls)
            call()
        self.now_s = until_s
