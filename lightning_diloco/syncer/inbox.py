"""The queue of events for the syncer's loop thread, with their arrival times, and limits for each session.

1. Transport threads and the merge thread put events. The clock thread puts ticks. The loop thread takes both in order
   of arrival, with the time of arrival. A learner therefore does not lapse while its heartbeats wait here, for example
   because of a slow disk.
2. The queue holds at most one tick.
3. If the clock thread wakes up more than STOOD_STILL_S late, the process was suspended (SIGSTOP, a debugger, swapping)
   and could not receive messages. The clock thread then puts a `StoodStill` event.
4. A tick lists the sessions that sent a payload, or a call that was refused. Such calls show that a session is alive,
   but may cause no event.
5. A flood delays only its sender. A session of the run may have MAX_OWN events waiting, MAX_OWN_BYTES in total. A
   session that has not joined may have MAX_STRANGE events waiting, a few more than a join needs. All these sessions
   together may have MAX_STRANGERS events waiting, because any caller can invent session ids.
6. If a call exceeds a limit, the syncer refuses the whole call. The error asks the caller to try again.

Source: our choice; a learner of 4,096 fragments asks for up to 4,096 fates after a reconnect, in successive calls.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_diloco.errors import BusyError, TransportError
from lightning_diloco.protocol import events
from lightning_diloco.syncer.merge_worker import DurableCommit
from lightning_diloco.transport.base import Json

TICK_S = 0.05
STOOD_STILL_S = 1.0
MAX_OWN = 1000
MAX_STRANGE = 8
MAX_STRANGERS = 1000
MAX_OWN_BYTES = 16 << 20
_EACH_BYTES = 64  # size of a Python value, or of a place in a table

Event = events.SyncerEvent | DurableCommit


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one waiting event in the limits."""

    session: str
    num_bytes: int
    is_members: bool


class Quota:
    """Counts waiting events by session; safe to use from several threads."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._num_strange = 0
        self._lock = threading.Lock()

    @contextmanager
    def places(self, session: str, messages: Sequence[Json], *, is_member: bool) -> Iterator[list[Place]]:
        """Reserve one place per message; they are freed if the block raises.

        Args:
            session: sender of the messages.
            messages: received messages.
            is_member: whether the session has joined the run.

        Raises:
            BusyError: a limit is exceeded for now; nothing was reserved.
            TransportError: the call alone exceeds a limit.
        """
        taken = [Place(session, size(message), is_member) for message in messages]
        self._take(session, taken, is_member=is_member)
        try:
            yield taken
        except BaseException:
            for place in taken:
                self.free(place)
            raise

    def _take(self, session: str, places: list[Place], *, is_member: bool) -> None:
        num, num_bytes = len(places), sum(place.num_bytes for place in places)
        most = MAX_OWN if is_member else MAX_STRANGE
        with self._lock:
            waiting, waiting_bytes = self._events[session] + num, self._bytes[session] + num_bytes
            num_strange = 0 if is_member else self._num_strange + num
            if num > most:  # also if nothing waited
                raise TransportError(
                    f"{num} events at once; at most {most} of this session; nothing of the call was used"
                )
            if waiting > most or num_strange > MAX_STRANGERS or waiting_bytes > MAX_OWN_BYTES:
                raise BusyError(
                    f"{waiting} events of {waiting_bytes} bytes of this session wait for the syncer; at most {most} of "
                    f"{MAX_OWN_BYTES} bytes may, and at most {MAX_STRANGERS} of all sessions that have not joined; "
                    "nothing of the call was used; try again"
                )
            self._events[session] = waiting
            self._bytes[session] = waiting_bytes
            self._num_strange += 0 if is_member else num

    def free(self, place: Place) -> None:
        """Free the place of an event that no longer waits."""
        with self._lock:
            _subtract(self._events, place.session, 1)
            _subtract(self._bytes, place.session, place.num_bytes)
            self._num_strange -= not place.is_members


class Inbox:
    """A queue of events and ticks; safe to use from several threads.

    Attributes:
        quota: places of the events that wait.
    """

    def __init__(self) -> None:
        self.quota = Quota()
        self._queue = queue.SimpleQueue[tuple[float, Event, Place | None] | None]()
        self._putting = threading.Lock()
        self._closed = threading.Event()
        self._heard: dict[str, float] = {}
        self._has_tick = False

    @property
    def num_waiting(self) -> int:
        return max(0, self._queue.qsize() - self._has_tick)  # ticks do not count

    def put(self, event: Event, place: Place | None = None) -> None:
        """Add an event with the current time; `take` frees its place. Times never decrease from event to event."""
        with self._putting:
            self._queue.put((time.monotonic(), event, place))

    def heard(self, session: str) -> None:
        """Record that a session is alive."""
        with self._putting:
            self._heard[session] = time.monotonic()

    def take(self) -> tuple[float, Event] | None:
        """Wait for the next event; return its arrival time and the event, or None if closed and empty."""
        if (taken := self._queue.get()) is None:
            return None
        came_s, event, place = taken
        if isinstance(event, events.Tick):
            self._has_tick = False
        if place is not None:
            self.quota.free(place)
        return came_s, event

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


def size(value: object) -> int:
    """Estimate the memory of a parsed JSON value, in bytes."""
    if isinstance(value, str):
        return _EACH_BYTES + len(value)
    if isinstance(value, dict):
        return _EACH_BYTES + sum(size(key) + size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return _EACH_BYTES + sum(map(size, value))
    return _EACH_BYTES


def _subtract(counter: Counter[str], session: str, number: int) -> None:
    counter[session] -= number
    if counter[session] <= 0:
        del counter[session]
