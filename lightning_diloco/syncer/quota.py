"""Limits on the events of each session that wait for the syncer's loop thread, so that a flood delays only its sender.

1. A session of the run may have MAX_OWN events waiting, MAX_OWN_BYTES in total.
2. A session that has not joined may have MAX_STRANGE events waiting, a few more than a join needs. All these sessions
   together may have MAX_STRANGERS events waiting, because any caller can invent session ids.
3. If a call exceeds a limit, the syncer refuses the whole call. The error asks the caller to try again.

Source: our choice; a learner of 4,096 fragments asks for up to 4,096 fates after a reconnect, in successive calls.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_diloco.errors import BusyError, TransportError
from lightning_diloco.protocol import events
from lightning_diloco.transport.base import Json

MAX_OWN = 1000
MAX_STRANGE = 8
MAX_STRANGERS = 1000
MAX_OWN_BYTES = 16 << 20
_EACH_BYTES = 64  # size of a Python value, or of a place in a table


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one waiting event in the limits."""

    session: str
    num_bytes: int
    is_members: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """A waiting event and its place."""

    event: events.SyncerEvent
    place: Place


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
