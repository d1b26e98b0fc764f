"""The syncer's messages, waiting for learners to take them.

1. Each session has a queue; a poll acknowledges everything up to its cursor and takes what came after.
2. Cursors start from the wall clock at boot, so a cursor of an earlier syncer process is recognised: the answer is then
   a single RESET, and the learner says hello again.
3. A session that nobody polls holds at most MAX_WAITING messages; older ones are dropped, and its next poll gets RESET.
4. There are at most MAX_SESSIONS queues, whatever sessions somebody makes up: the one that was not used for the longest
   time is forgotten, of a session that is no member's if there is one, and its next poll gets RESET.
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
    messages: deque[Json] = field(default_factory=deque)

    @property
    def head(self) -> int:
        return self.first + len(self.messages)


class Outbox:
    """Queues of all sessions; safe to use from several threads.

    Args:
        is_member: whether the run knows a session.
    """

    def __init__(self, is_member: Callable[[str], bool] = lambda session: False) -> None:
        self._is_member = is_member
        self._start = time.time_ns() // 1000
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, session: str, message: Json) -> None:
        """Leave a message for this session."""
        with self._changed:
            queue = self._queue(session)
            queue.messages.append(message)
            while len(queue.messages) > MAX_WAITING:
                queue.messages.popleft()
                queue.first += 1
            self._changed.notify_all()

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        """Take what came after cursor, waiting up to wait_s for it."""
        until_s = time.monotonic() + wait_s
        with self._changed:
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
                self._changed.wait(left_s)
            return Polled(queue.head, tuple(queue.messages))

    def close(self) -> None:
        """Let all waiting polls return."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _queue(self, session: str) -> _Queue:
        queue = self._queues.setdefault(session, _Queue(self._start))
        self._queues.move_to_end(session)
        if len(self._queues) > MAX_SESSIONS:
            oldest = next((each for each in self._queues if not self._is_member(each)), next(iter(self._queues)))
            forgotten = self._queues.pop(oldest)
            self._start = max(self._start, forgotten.head + 1)  # no cursor of it fits a queue to come
        return queue
