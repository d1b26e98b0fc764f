"""Holds decisions back until the standby has all records before them.

1. A message waits for the last record that the loop thread wrote before it, a commit for its own record. Messages leave
   in the order in which they came, and so do commits. A commit may be large. A message does not wait for it, unless the
   loop thread has written a record behind it.
2. Without a standby, messages are sent at once.
3. At most MAX_HELD messages wait. Then the loop thread waits, too.

Source: our choice; the rules are in `protocol/syncer/succession.py`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

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
        lsn: last record of the log.
        send: sends a message to a session.
        install: takes a commit that may be announced.
    """

    def __init__(
        self,
        replica: Replica,
        lsn: int,
        *,
        send: Callable[[str, Json], object],
        install: Callable[[DurableCommit], object],
    ) -> None:
        self._replica, self._lsn = replica, lsn
        self._send, self._install = send, install
        self._commits: queue.SimpleQueue[DurableCommit | None] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[_Held | None] = queue.SimpleQueue()
        self._has_withheld = False
        self._num_held = self._num_sent = 0  # written by the loop thread, and by the messages thread

    def wrote(self, lsn: int) -> None:
        """Note a record; later messages wait for it. Loop thread."""
        self._lsn = lsn
        self._replica.wake()

    def send(self, session: str, message: Json) -> None:
        """Send a message, now or later. Loop thread."""
        num_waiting = self._num_held - self._num_sent
        if self._replica.address is None and not num_waiting:
            self._send(session, message)
            return
        if num_waiting >= MAX_HELD:
            self._replica.wait(self._lsn)
        self._num_held += 1
        self._messages.put(_Held(self._lsn, session, message))

    def commit(self, made: DurableCommit) -> None:
        """Pass on a durable commit, now or later. Merge thread."""
        self._replica.wake()
        self._commits.put(made)

    def run_commits(self) -> None:
        """Pass on commits until `end_commits`. Meanwhile, the merge thread computes the next one."""
        while (made := self._commits.get()) is not None:
            self._replica.wait(made.lsn)
            if self._replica.may_announce:  # otherwise learners would get a version that the standby lacks
                self._install(made)
            else:
                self._has_withheld = True

    @property
    def has_withheld(self) -> bool:
        """Whether a durable commit was not passed on; known after `run_commits` has ended."""
        return self._has_withheld or not self._commits.empty()

    def run_messages(self) -> None:
        """Send messages until `end_messages`. Meanwhile, the loop thread decides more."""
        while (held := self._messages.get()) is not None:
            self._replica.wait(held.lsn)
            self._send(held.session, held.message)
            self._num_sent += 1

    def end_commits(self) -> None:
        """End `run_commits` after the commits that wait now."""
        self._commits.put(None)

    def end_messages(self) -> None:
        """End `run_messages` after the messages that wait now."""
        self._messages.put(None)
