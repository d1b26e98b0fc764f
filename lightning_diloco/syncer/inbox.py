"""The queue of events for the syncer's loop thread, with their arrival times.

1. Transport threads and the merge thread put events. The clock thread puts ticks. The loop thread takes both in order
   of arrival, with the time of arrival. A learner therefore does not lapse while its heartbeats wait here, for example
   because of a slow disk.
2. The queue holds at most one tick.
3. If the clock thread wakes up more than STOOD_STILL_S late, the process was suspended (SIGSTOP, a debugger, swapping)
   and could not receive messages. The clock thread then puts a `StoodStill` event.
4. A tick lists the sessions that sent a payload, or a call that was refused. Such calls show that a session is alive,
   but may cause no event.
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
    """A queue of events and ticks; safe to use from several threads."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, T | events.Tick | events.StoodStill] | None] = queue.SimpleQueue()
        self._putting = threading.Lock()
        self._closed = threading.Event()
        self._heard: dict[str, float] = {}
        self._has_tick = False

    @property
    def num_waiting(self) -> int:
        return max(0, self._queue.qsize() - self._has_tick)  # ticks do not count

    def put(self, event: T | events.Tick | events.StoodStill) -> None:
        """Add an event with the current time. Times never decrease from event to event."""
        with self._putting:
            self._queue.put((time.monotonic(), event))

    def heard(self, session: str) -> None:
        """Record that a session is alive."""
        with self._putting:
            self._heard[session] = time.monotonic()

    def take(self) -> tuple[float, T | events.Tick | events.StoodStill] | None:
        """Wait for the next event; return its arrival time and the event, or None if closed and empty."""
        taken = self._queue.get()
        if taken is not None and isinstance(taken[1], events.Tick):
            self._has_tick = False
        return taken

    def close(self) -> None:
        """End the clock thread now, and the loop thread after it has taken all waiting events."""
        self._closed.set()
        self._queue.put(None)

    def run_clock(self) -> None:
        """Put ticks until closed. Runs in its own thread."""
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
