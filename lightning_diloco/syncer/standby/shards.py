"""The shards of a standby, which follow those of the primary, each from its own log (`shards/copying.py`).

1. A thread per shard repeatedly asks it to copy from the primary's shard with the same number.
2. The standby writes a decision to its own log only when the shard has the outer gradient on disk. So a takeover finds
   everything that its log needs.
3. After a start, and after the loss of its files, a shard must first have all records of the primary's shard. Until
   then the standby reports that it has no records.

Source: our choice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

from lightning_diloco.errors import ConfigError, DiLoCoError, RemoteError
from lightning_diloco.process.retry import problem_of
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.storage.log_frames import Record
from lightning_diloco.syncer.shards import requests as ask
from lightning_diloco.syncer.shards.remote import CALL_S, COMPUTE_S, RemoteShard
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.transport.address import placed
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)

POLL_S = 1.0
SOON_S = 0.1  # for decisions that follow soon
AGAIN_S, AGAIN_AT_MOST_S = 0.2, 30.0


class _Following:
    """One shard of a standby.

    Args:
        shard: the shard.
        primary: address and key of the primary.
    """

    def __init__(self, shard: RemoteShard, primary: Invitation) -> None:
        self._shard, self._primary = shard, primary
        self.address = ""
        self._changed = threading.Condition()
        self._is_open = self._has_all = self._has_ended = self._is_over = False
        self._lsn = self._num_undecided = self._num_opened = 0
        self._decided: dict[int, ask.Decided] = {}
        self._thread = threading.Thread(target=self._run, name=f"diloco-shard-{shard.part[0]}", daemon=True)
        self._thread.start()

    def open(self, versions: Sequence[int]) -> None:
        """Begin to follow for a standby whose log has these versions."""
        with self._changed:
            self._is_open, self._has_all, self._num_opened = True, False, self._num_opened + 1
            k, num_shards = self._shard.part
            self._decided = {p: ask.Decided(p, versions[p]) for p in range(k, len(versions), num_shards)}
            self._changed.notify_all()

    def close(self) -> None:
        """Stop following until `open`."""
        with self._changed:
            self._is_open = self._has_all = False

    def end(self, *, is_over: bool) -> None:
        """End the thread after its present call. Wait for it only if the run is over: the primary may be silent."""
        with self._changed:
            self._has_ended, self._is_open, self._is_over = True, False, is_over
            self._changed.notify_all()
        if is_over:
            self._thread.join(2 * POLL_S)

    def has(self, lsn: int, within_s: float) -> bool:
        """Return whether the shard has this record of its log; wait for it for a while."""
        with self._changed:
            return self._changed.wait_for(lambda: lsn <= self._lsn, within_s)

    def decided(self, p: int, version: int) -> None:
        """Note a decision that the standby has on disk."""
        with self._changed:
            self._decided[p] = ask.Decided(p, version)

    @property
    def has_all(self) -> bool:
        """Whether the shard has had all records of the primary's shard since it began to follow."""
        return self._has_all

    def _run(self) -> None:
        connection, said, pause_s = None, "", AGAIN_S
        while not self._has_ended:
            with self._changed:
                num_opened = self._num_opened
                if not (self._is_open and self.address):
                    self._changed.wait(AGAIN_S)
                    continue
                # Before the shard has all, its gradient of a version may be one that was withdrawn.
                decided = tuple(self._decided.values()) if self._has_all else ()
                wait_s = (SOON_S if self._num_undecided else POLL_S) if self._has_all else 0.0
            try:
                connection = connection or self._shard.connect()
                origin = replace(self._primary, address=placed(self._primary.address, self.address))
                request = ask.Follow(*self._shard.part, self._shard.following, origin.text(), wait_s, decided)
                answer = connection.get(ask.header(self._shard.key, request), deadline_s=COMPUTE_S).header
                self._answered(answer, decided, num_opened)
                said, pause_s = "", AGAIN_S
            except DiLoCoError as error:
                if self._has_ended:
                    break
                pause_s = AGAIN_S if isinstance(error, RemoteError) else min(2 * pause_s, AGAIN_AT_MOST_S)
                if isinstance(error, RemoteError) and connection is not None:
                    connection.close()
                    connection = None
                if problem_of(error) != said:
                    said = problem_of(error)
                    log.warning("%s does not follow: %s", self._shard.name, error)
                self._pause(pause_s)
        if connection is not None:
            if self._is_over:
                with contextlib.suppress(DiLoCoError):
                    connection.get(ask.header(self._shard.key, ask.Over()), deadline_s=CALL_S)
            connection.close()

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, pause_s)

    def _answered(self, answer: Json, told: Sequence[ask.Decided], num_opened: int) -> None:
        lsn = answer["lsn"]
        with self._changed:
            if lsn is None or lsn < self._lsn:  # it has lost its files, or is copying the shard again
                self._has_all = False
            elif answer["has_all"] and num_opened == self._num_opened:
                self._has_all = True
            self._lsn, self._num_undecided = lsn or 0, answer["undecided"]
            for each in told:
                if self._decided.get(each.fragment) == each:
                    del self._decided[each.fragment]
            self._changed.notify_all()


class StandbyShards:
    """The shards of a standby.

    Args:
        shards: shards 1, 2, ... of the standby.
        primary: address and key of the primary.
    """

    def __init__(self, shards: Sequence[RemoteShard], primary: Invitation) -> None:
        self._each = [_Following(shard, primary) for shard in shards]
        self._is_open = False

    def open(self, state: SyncerState) -> None:
        """Begin to follow for a standby that has this state, unless that is done, or there are no start values yet."""
        if not self._is_open and state.manifest is not None:
            self._is_open = True
            for each in self._each:
                each.open([fragment.version for fragment in state.rounds.fragments])

    def close(self) -> None:
        """Stop following until `open`."""
        self._is_open = False
        for each in self._each:
            each.close()

    def end(self, *, is_over: bool) -> None:
        """Stop following, because the standby takes over or ends.

        Args:
            is_over: the run has finished, so the shards end as well.
        """
        for each in self._each:
            each.end(is_over=is_over)

    def know(self, addresses: Sequence[str]) -> None:
        """Store the addresses of the primary's shards.

        Raises:
            ConfigError: the primary has another number of shards.
        """
        if len(addresses) != len(self._each):
            raise ConfigError(
                f"the primary has {len(addresses) + 1} shards, this standby has {len(self._each) + 1}; start the "
                "standby again"
            )
        for each, address in zip(self._each, addresses, strict=True):
            each.address = address or each.address

    @property
    def have_all(self) -> bool:
        """Whether all shards have caught up."""
        return all(each.has_all for each in self._each)

    def num_complete(self, taken: Sequence[Record], within_s: float) -> int:
        """Return how many of these records, from the first on, may be written; wait for a gradient for a while."""
        for i, record in enumerate(taken):
            for each in self._concerned(record):
                if not each.has(record.header.get("shard_lsn", 0), within_s):
                    return i
        return len(taken)

    def wrote(self, copied: Sequence[Record]) -> None:
        """Note the decisions in these records of the run's log, which are on disk."""
        for record in copied:
            for each in self._concerned(record):
                each.decided(record.header["fragment"], record.header["version"])

    def _concerned(self, record: Record) -> list[_Following]:
        """Return the shard of a decision; none if this process has the fragment, or the record is another one."""
        if record.header["kind"] != records.CommitRecord.__name__:
            return []
        k = record.header["fragment"] % (len(self._each) + 1)
        return [self._each[k - 1]] if k else []
