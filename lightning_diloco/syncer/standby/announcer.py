"""Holds decisions back until the standby has all records before them.

1. A message waits for the last record that was written before it, a commit for its own record. All leave in the order
   in which they came, so a message never overtakes another one.
2. Without a standby, messages are sent at once.
3. At most MAX_HELD messages wait. Then the loop thread waits, too.

Source: our choice; the rules are in `protocol/syncer/succession.py`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer.merge_worker import DurableCommit
from lightning_diloco.syncer.standby.replica import Replica
from lightning_diloco.transport.base import Json

MAX_HELD = 4096


@dataclass(frozen=True, slots=True)
class _Held:
    """A message that may be sent when the standby has this record."""

    lsn: int
    session: str
    message: Json


class Announcer:
    """Passes decisions on.

    Args:
        replica: what the primary knows of its standby.
        redo_log: the log with the records.
        send: sends a message to a session.
        install: takes a commit that may be announced.

    Attributes:
        lsn: the last record that was written by the loop thread, which sets it.
    """

    def __init__(
        self,
        replica: Replica,
        redo_log: RedoLog,
        *,
        send: Callable[[str, Json], object],
        install: Callable[[DurableCommit], object],
    ) -> None:
        self.lsn = redo_log.last_lsn
        self._replica, self._log = replica, redo_log
        self._send, self._install = send, install
        self._queue: queue.SimpleQueue[_Held | DurableCommit | None] = queue.SimpleQueue()
        self._num_held = self._num_sent = 0  # written by the loop thread, and by the announce thread

    def send(self, session: str, message: Json) -> None:
        """Send a message, now or later. Loop thread."""
        num_waiting = self._num_held - self._num_sent
        if self._replica.address is None and not num_waiting:
            self._send(session, message)
            return
        if num_waiting >= MAX_HELD:
            self._replica.wait(self._log.durable_lsn)
        self._num_held += 1
        self._queue.put(_Held(self.lsn, session, message))

    def commit(self, made: DurableCommit) -> None:
        """Pass on a durable commit, now or later. Merge thread."""
        self._queue.put(made)

    def run(self) -> None:
        """Pass on what may be announced, until `end`. Meanwhile, the other threads decide more."""
        while (made := self._queue.get()) is not None:
            self._replica.wait(made.lsn)
            if isinstance(made, DurableCommit):
                self._install(made)
            else:
                self._send(made.session, made.message)
                self._num_sent += 1

    def end(self) -> None:
        """End `run` after what waits now."""
        self._queue.put(None)
