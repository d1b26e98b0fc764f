"""The control channel of a learner: sends and receives messages, and detects outages.

1. One thread sends messages in order, and ticks. Another thread polls. Neither touches tensors.
2. While the syncer cannot be reached, messages are dropped. The state machine repeats them after the next hello.
3. After any failed call the channel is offline, even if the call failed because a certificate or token is no longer
   valid. Training continues, and polls are repeated as long as the learner runs.
4. The one exception: if too many events of this session wait for the syncer, the sender tries again, up to BUSY_S.
5. The channel is online again when the syncer answers a poll. A RESET means that the syncer lost messages for this
   learner. The learner then sends a hello.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from lightning_diloco.errors import BusyError, RemoteError
from lightning_diloco.process.retry import retry
from lightning_diloco.process.threads import Crew
from lightning_diloco.protocol import codec, messages
from lightning_diloco.protocol.messages import News
from lightning_diloco.transport.base import RESET, Connection

log = logging.getLogger(__name__)

POLL_S = 2.0
LAST_POLLS_S = 0.2
TICK_S = 0.1
RECONNECT_S = (0.1, 0.5)
MAX_BATCH = 64
BUSY_S = 5.0


class ControlChannel:
    """One session's control messages.

    Args:
        connection: connection to the syncer.
        session: nonce of this process.
        cursor: cursor of the next poll.
        crew: runs the two threads.
        hear: called with each message, in order.
        reconnect: called with the number of the new connection; sends a hello.
        tick: called about every TICK_S.

    Attributes:
        news: last news of the run from the syncer.
    """

    def __init__(
        self,
        connection: Connection,
        session: str,
        cursor: int,
        crew: Crew,
        *,
        hear: Callable[[messages.FromSyncer], object],
        reconnect: Callable[[int], object],
        tick: Callable[[], object],
    ) -> None:
        self._connection = connection
        self._session = session
        self._cursor = cursor
        self._crew = crew
        self._hear, self._reconnect, self._tick = hear, reconnect, tick
        self._must_introduce = threading.Event()
        self._outgoing: queue.SimpleQueue[messages.FromLearner] = queue.SimpleQueue()
        self._switching = threading.Lock()
        self._offline_since_s: float | None = None
        self._offline_s = 0.0
        self._num_connections = 1
        self._poll_s = POLL_S
        self.news = News()
        crew.start("sender", self._send_loop)
        crew.start("listener", self._listen_loop)

    @property
    def is_online(self) -> bool:
        return self._offline_since_s is None

    @property
    def outage_s(self) -> float | None:
        """Seconds since the syncer could last be reached; None while online."""
        since_s = self._offline_since_s
        return None if since_s is None else time.monotonic() - since_s

    @property
    def offline_s(self) -> float:
        """Total seconds offline."""
        return self._offline_s + (self.outage_s or 0.0)

    def say(self, message: messages.FromLearner) -> None:
        """Queue a message; never waits."""
        self._outgoing.put(message)

    def say_now(self, message: messages.FromLearner, *, within_s: float) -> None:
        """Send a message at once and wait for its delivery, with retries. Used at the end of the run."""
        try:
            retry(partial(self._send, [message]), within_s=within_s)
        except RemoteError as error:
            log.warning("the syncer did not receive %s: %s", type(message).__name__, error)

    def hurry(self) -> None:
        """Shorten polls, so that `_listen_loop` ends soon after the crew stops. Any thread, including that one."""
        self._poll_s = LAST_POLLS_S

    # --------------------------------------------------------------------------------------------------------- sender

    def _send_loop(self) -> None:
        next_tick_s = 0.0
        unsent: list[messages.FromLearner] = []
        while not self._crew.stopping.is_set():
            if not unsent:
                unsent, busy_until_s = self._take_batch(), time.monotonic() + BUSY_S
            if self._is_done_with(unsent, busy_until_s):
                unsent = []
            else:
                self._crew.stopping.wait(TICK_S)
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + TICK_S
                self._tick()

    def _is_done_with(self, batch: list[messages.FromLearner], busy_until_s: float) -> bool:
        """Send a batch; return False if it must be sent again, because the syncer is busy."""
        if batch and self.is_online:
            try:
                self._send(batch)
            except BusyError as error:
                if time.monotonic() < busy_until_s:
                    return False
                self._went_offline(error)
            except RemoteError as error:
                self._went_offline(error)
        return True

    def _take_batch(self) -> list[messages.FromLearner]:
        batch: list[messages.FromLearner] = []
        try:
            batch.append(self._outgoing.get(timeout=TICK_S))
            while len(batch) < MAX_BATCH:
                batch.append(self._outgoing.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _send(self, batch: list[messages.FromLearner]) -> None:
        answer = self._connection.send(self._session, [messages.encode(message) for message in batch])
        self.news = codec.load(News, answer)

    # ------------------------------------------------------------------------------------------------------- listener

    def _listen_loop(self) -> None:
        pause_s = RECONNECT_S[0]
        while not self._crew.stopping.is_set():
            try:
                heard, was_reset = self._poll()
            except RemoteError as error:
                self._went_offline(error)
                self._crew.stopping.wait(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_S[1])
                continue
            pause_s = RECONNECT_S[0]
            if was_reset or not self.is_online:
                self._came_back()
            for message in heard:
                self._hear(message)
            if self._must_introduce.is_set():
                self._must_introduce.clear()
                self._came_back()

    def _poll(self) -> tuple[list[messages.FromSyncer], bool]:
        polled = self._connection.poll(self._session, self._cursor, self._poll_s if self.is_online else 0.0)
        self._cursor = polled.cursor
        heard = [messages.decode(said, messages.FromSyncer) for said in polled.messages if said != RESET]
        return cast("list[messages.FromSyncer]", heard), len(heard) < len(polled.messages)

    def introduce(self) -> None:
        """Make the listener send a hello again, as after an outage."""
        self._must_introduce.set()

    def _went_offline(self, error: RemoteError) -> None:
        with self._switching:
            if self.is_online and not self._crew.stopping.is_set():
                self._offline_since_s = time.monotonic()
                if self._poll_s == POLL_S:  # otherwise this learner has left, and the syncer may have ended
                    log.warning("the syncer cannot be reached, training on: %s", error)

    def _came_back(self) -> None:
        with self._switching:
            since_s, self._offline_since_s = self._offline_since_s, None
            if since_s is not None:
                self._offline_s += time.monotonic() - since_s
                log.warning("the syncer is back after %.1f s", time.monotonic() - since_s)
        self._num_connections += 1
        self._reconnect(self._num_connections)
