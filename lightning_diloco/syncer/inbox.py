"""What the syncer is told, in the order in which it came, and with the time at which it came.

1. Transport threads and the merge thread put events, a clock thread puts ticks, the loop thread takes both. However
   long the loop was held up, by a slow disk perhaps: what came before a tick is taken before it. So nobody lapses whose
   heartbeats wait here.
2. At most one tick waits.
3. A clock that wakes up more than STOOD_STILL_S late tells that the whole process stood still (SIGSTOP, a debugger, a
   machine that swaps): nobody could be heard meanwhile.
4. A tick carries who has been heard from without an event: by a payload, or by a call that was refused.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Generic, TypeVar

from lightning_diloco.protocol import events

TICK_S = 0.05
STOOD_STILL_S = 1.0

T = TypeVar("T")


class Inbox(Generic[T]):
    """Events on their way to the loop thread, beside ticks; safe to use from several threads."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, T | events.Tick | events.StoodStill] | None] = queue.SimpleQueue()
        self._putting = threading.Lock()
        self._closed = threading.Event()
        self._heard: dict[str, float] = {}
        self._has_tick = False

    @property
    def num_waiting(self) -> int:
        return max(0, self._queue.qsize() - self._has_tick)  # a tick is no event of anybody

    def put(self, event: T | events.Tick | events.StoodStill) -> None:
        """Stamp this and leave it for the loop thread; times never fall from one event to the next."""
        with self._putting:
            self._queue.put((time.monotonic(), event))

    def heard(self, session: str) -> None:
        """This session is alive, whatever it said."""
        with self._putting:
            self._heard[session] = time.monotonic()

    def take(self) -> tuple[float, T | events.Tick | events.StoodStill] | None:
        """Wait for the next event and the time at which it came; None: closed, and everything was taken."""
        taken = self._queue.get()
        if taken is not None and isinstance(taken[1], events.Tick):
            self._has_tick = False
        return taken

    def close(self) -> None:
        """End the clock, and the loop once it has taken what is here."""
        self._closed.set()
        self._queue.put(None)

    def run_clock(self) -> None:
        """Put ticks until closed; in a thread of its own."""
        woke_s = time.monotonic()
        while not self._closed.wait(TICK_S):
            slept_s, woke_s = time.monotonic() - woke_s, time.monotonic()
            if slept_s - TICK_S > STOOD_STILL_S:
                self.put(events.StoodStill(slept_s - TICK_S))
            if not self._has_tick:
                self._has_tick = True
                with self._putting:
                    heard, self._heard = self._heard, {}
                self.put(events.Tick(heard))
