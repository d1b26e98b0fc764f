"""Queues of the syncer's messages, which learners poll.

1. Each session has a queue. A poll acknowledges all messages up to its cursor and returns the later messages.
2. Cursors start from the wall clock at the start of the process, so the syncer recognizes a cursor of an earlier syncer
   process. It answers such a cursor with a single RESET, and the learner sends a hello again.
3. A queue holds at most MAX_WAITING messages. Older messages are dropped, and the next poll gets RESET.
4. There are at most MAX_SESSIONS queues, because any caller can invent session ids. A further queue replaces the least
   recently used queue of a session that has not joined, or of any session if all have joined. The next poll of that
   session gets RESET.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_diloco.transport.base import RESET, Json, Polled

MAX_WAITING = 1000
MAX_SESSIONS = 2048


@dataclass(slots=True)
class _Queue:
    first: int
    changed: threading.Condition
    messages: deque[Json] = field(default_factory=deque)

    @property
    def head(self) -> int:
        return self.first + len(self.messages)


class Outbox:
    """Queues of all sessions; safe to use from several threads.

    Args:
        is_member: returns whether a session has joined the run.
    """

    def __init__(self, is_member: Callable[[str], bool] = lambda session: False) -> None:
        self._is_member = is_member
        self._start = time.time_ns() // 1000
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, session: str, message: Json) -> None:
        """Queue a message for a session."""
        with self._lock:
            queue = self._queue(session)
            queue.messages.append(message)
            while len(queue.messages) > MAX_WAITING:
                queue.messages.popleft()
                queue.first += 1
            queue.changed.notify_all()

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        """Return the messages after `cursor`; wait up to `wait_s` if there are none."""
        until_s = time.monotonic() + wait_s
        with self._lock:
            queue = self._queue(session)
            if not queue.first <= cursor <= queue.head:
                return Polled(queue.first, (RESET,))
            while queue.first < cursor:
                queue.messages.popleft()
                queue.first += 1
            while not queue.messages and not self._is_closed:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    break
                queue.changed.wait(left_s)
            return Polled(queue.head, tuple(queue.messages))

    def close(self) -> None:
        """End all waiting polls."""
        with self._lock:
            self._is_closed = True
            for queue in self._queues.values():
                queue.changed.notify_all()

    def _queue(self, session: str) -> _Queue:
        if session not in self._queues:
            self._queues[session] = _Queue(self._start, threading.Condition(self._lock))
        queue = self._queues[session]
        self._queues.move_to_end(session)
        if len(self._queues) > MAX_SESSIONS:
            strangers = (each for each in self._queues if each != session and not self._is_member(each))
            oldest = next(strangers, next(iter(self._queues)))
            forgotten = self._queues.pop(oldest)
            self._start = max(self._start, forgotten.head + 1)  # a cursor of this queue must not fit a later queue
        return queue
