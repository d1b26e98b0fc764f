"""Simulated time: functions are called at their time, and the last events are kept for error messages."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

_NUM_KEPT = 80


class Timeline:
    """Simulated time. Calls for the same time are made in the order in which they were scheduled.

    Attributes:
        now_s: the present time.
        num_events: events that machines have handled.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._history: deque[tuple[float, str, object]] = deque(maxlen=_NUM_KEPT)

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call a function after this time."""
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), call))

    @property
    def next_s(self) -> float:
        """Return the time of the next call; infinity if there is none."""
        return self._queue[0][0] if self._queue else float("inf")

    def run_until(self, until_s: float) -> None:
        """Make all calls up to this time."""
        while self.next_s <= until_s:
            self.now_s, _, call = heapq.heappop(self._queue)
            call()
        self.now_s = until_s

    def note(self, whose: str, event: object) -> None:
        """Note an event that a machine handles."""
        self.num_events += 1
        self._history.append((self.now_s, whose, event))

    def story(self) -> str:
        """Return the last events as text."""
        return "\n".join(f"{at_s:9.3f} {whose} <- {event}" for at_s, whose, event in self._history)
