"""How much of what waits for the syncer's loop may be one session's: a flood makes its sender wait, and nobody else.

1. A session of the run may have MAX_OWN events waiting, of MAX_OWN_BYTES in all.
2. Whoever is no member may have MAX_STRANGE events waiting, a few more than a join takes, and all of them together
   MAX_STRANGERS: sessions cost nothing to make up.
3. What does not fit is refused whole, with an error that says to try again.

Source: our choice; a returning learner of 4,096 fragments asks for the fate of each, in calls one after the other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_diloco.errors import TransportError
from lightning_diloco.protocol import events
from lightning_diloco.transport.base import Json

MAX_OWN = 1000
MAX_STRANGE = 8
MAX_STRANGERS = 1000
MAX_OWN_BYTES = 16 << 20
_EACH_BYTES = 64  # a value, or a place in a table, as Python holds it


@dataclass(frozen=True, slots=True)
class Place:
    """What one event takes while it waits."""

    session: str
    num_bytes: int
    is_members: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """An event that waits, and its place."""

    event: events.SyncerEvent
    place: Place


class Quota:
    """Counts what waits, by session; safe to use from several threads."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._num_strange = 0
        self._lock = threading.Lock()

    @contextmanager
    def places(self, session: str, messages: Sequence[Json], *, is_member: bool) -> Iterator[list[Place]]:
        """Set places aside, one for each message; they are free again if the block raises.

        Args:
            session: whose they are.
            messages: as they came.
            is_member: whether the run knows the session.

        Raises:
            TransportError: there are not so many; none was taken.
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
            if waiting > most or num_strange > MAX_STRANGERS or waiting_bytes > MAX_OWN_BYTES:
                raise TransportError(
                    f"{waiting} events of {waiting_bytes} bytes of this session wait for the syncer; at most {most} of "
                    f"{MAX_OWN_BYTES} bytes may, and at most {MAX_STRANGERS} of all who have not joined; nothing of "
                    "this was used; try again"
                )
            self._events[session] = waiting
            self._bytes[session] = waiting_bytes
            self._num_strange += 0 if is_member else num

    def free(self, place: Place) -> None:
        """An event waits no more."""
        with self._lock:
            _subtract(self._events, place.session, 1)
            _subtract(self._bytes, place.session, place.num_bytes)
            self._num_strange -= not place.is_members


def size(value: object) -> int:
    """About what parsed JSON takes in memory."""
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
