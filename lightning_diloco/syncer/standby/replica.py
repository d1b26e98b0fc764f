"""The primary's view of its standby: sends it the run's files and log, and waits until it has a record.

1. Only the standby opens connections. It requests records of the log, and reports the records on its disk.
2. A standby that has caught up is *registered*, durably. From then on a decision is announced only when the standby has
   its record, or when the primary may continue alone (`protocol/syncer/succession.py`).
3. There is one standby. Another one is refused until the registered one has been given up.
4. If a standby reports that it has taken over, this syncer announces nothing more, and ends.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from lightning_diloco.errors import AuthError, ConfigError, StorageError
from lightning_diloco.protocol.syncer.succession import Fleets, Primary
from lightning_diloco.storage.files import storage, sync_directory, write_whole
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.standby.origin import Origin, is_the_key
from lightning_diloco.syncer.standby.reign import reign
from lightning_diloco.syncer.standby.requests import HaveLog, TookOver, decode
from lightning_diloco.transport.address import split_host_port
from lightning_diloco.transport.base import Bulk, Json

log = logging.getLogger(__name__)

LOOK_S = 0.25
LAST_WAIT_S = 2.0
_REGISTERED = "syncer/standby.json"


def forget_standby(run_dir: Path) -> None:
    """Remove the registration of a standby, durably: this directory is a standby's own now."""
    file = run_dir / _REGISTERED
    if file.exists():
        with storage("remove", file):
            file.unlink()
            sync_directory(file.parent)


def has_standby(run_dir: Path) -> bool:
    """Return whether a standby follows the run in this directory."""
    return (run_dir / _REGISTERED).exists()


class Replica:
    """The primary's state of its standby; its methods may be called from several threads.

    Args:
        run_dir: RUN_DIR.
        redo_log: the log that the standby follows.
        key: key that a standby must send; "" refuses all.
        fleets: the fleets that the standby may count, as far as the disk shows.
        shards: the primary's shards in other processes.

    Attributes:
        address: `host:port` of the registered standby; None: there is none.
        successor: `host:port` of the standby that has taken over; None: none has.
        common_lsn: last record that the successor has, too.
        is_followed: whether the standby has reported since this process began, so it has not taken over before.
    """

    def __init__(
        self, run_dir: Path, redo_log: RedoLog, key: str, fleets: Fleets, shards: Sequence[RemoteShard] = ()
    ) -> None:
        self._run_dir, self._log, self._key, self._fleets = run_dir, redo_log, key, fleets
        self._shards = shards
        self.is_followed = False
        self._file = run_dir / _REGISTERED
        self.address: str | None = json.loads(self._file.read_text())["address"] if self._file.exists() else None
        self.successor: str | None = None
        self.common_lsn = 0
        self._reign = reign(run_dir)
        self._rule = Primary(time.monotonic())
        self._changed = threading.Condition()
        self._acked_lsn, self._counts_from_lsn = 0, redo_log.last_lsn
        self._is_ending = self._has_ended = self._was_told = False
        self._waiting: dict[int, float] = {}  # records, and since when they wait
        self._origin = Origin(run_dir, run_dir / "syncer" / "snapshot", redo_log)

    def heard(self, session: str) -> None:
        """Record an answered call of a learner."""
        with self._changed:
            self._rule.heard(session, time.monotonic())

    def status(self) -> Json | None:
        """Return the registered standby for the status; None if there is none.

        Returns:
            `address`; `silent_s` since it was heard; `waits_s` for which decisions have been waiting for it, null if
            none waits; `records_behind` that it does not have yet.
        """
        with self._changed:
            if self.address is None:
                return None
            now_s = time.monotonic()
            return {
                "address": self.address,
                "silent_s": self._rule.silent_s(now_s),
                "waits_s": max((now_s - since_s for since_s in self._waiting.values()), default=None),
                "records_behind": self._num_missing,
            }

    @property
    def is_behind(self) -> bool:
        """Whether a restarted syncer must wait before it serves, because its standby lacks the end of its log."""
        with self._changed:
            return self._must_wait(self._log.last_lsn)

    @property
    def may_announce(self) -> bool:
        """Whether this syncer may still announce decisions.

        It may not after a takeover, or if it stopped before the standby had its last records.
        """
        return self.successor is None and not (self._has_ended and self._num_missing)

    def wait(self, lsn: int) -> None:
        """Wait until a durable record may be announced; at most LAST_WAIT_S if the syncer stops."""
        with self._changed:
            self._waiting.setdefault(lsn, time.monotonic())
            while self._must_wait(lsn):
                self._changed.wait(LOOK_S)
            self._waiting.pop(lsn, None)

    def wake(self) -> None:
        """Send new records to the standby at once, if it waits for them."""
        self._origin.wake()

    def fleet_changes_to(self, learners: Collection[str], changed: Collection[str]) -> None:
        """Record the fleet after an event whose records are not written yet, and the sessions that they name."""
        with self._changed:
            self._fleets = self._fleets.or_(learners, changed)

    def fleet_is(self, learners: Collection[str]) -> None:
        """Record the fleet, when the standby has all records that determine it."""
        with self._changed:
            self._fleets = Fleets.only(learners)

    def _must_wait(self, lsn: int) -> bool:
        if self.address is None or self._acked_lsn >= lsn or self._has_ended or self.successor is not None:
            return False
        if not self._rule.may_continue_alone(self._fleets, time.monotonic()):
            return True
        log.warning("the standby at %s does not answer; the run continues without it", self.address)
        try:
            self._register(None)
        except StorageError as error:
            log.warning("not without it yet: %s", error)
            return True
        return False

    def _register(self, address: str | None) -> None:
        if address is None:
            forget_standby(self._run_dir)
        else:
            write_whole(self._file, json.dumps({"address": address}).encode())
        self.address = address

    def end(self, *, is_over: bool) -> None:
        """Let the standby copy the last records, and stop waiting for it.

        Args:
            is_over: the run has finished, so the standby may end as well.
        """
        with self._changed:
            self._is_ending = is_over
            until_s = time.monotonic() + LAST_WAIT_S
            while self._must_end_later() and time.monotonic() < until_s:
                self._origin.wake()
                self._changed.wait(LOOK_S)
            self._has_ended = True
            self._changed.notify_all()
        self._origin.close()

    def _must_end_later(self) -> bool:
        must_be_told = self._is_ending and not self._was_told and self.address is not None
        return self.successor is None and (self._num_missing > 0 or must_be_told)

    @property
    def lacks_records(self) -> bool:
        """Whether the standby does not have all durable records."""
        with self._changed:
            return self._num_missing > 0

    @property
    def _num_missing(self) -> int:
        """Durable records that the standby does not have; 0 without a standby."""
        return 0 if self.address is None else max(0, self._log.durable_lsn - self._acked_lsn)

    # -------------------------------------------------------------------------------------------- called by transport

    def on_get(self, header: Json) -> Bulk:
        """Answer a standby.

        Args:
            header: {"key", "request"}, see `requests`; and {"mark", "span", "at"} for a portion, see `portions`.

        Raises:
            AuthError: wrong key.
            ConfigError: the run has another standby.
            CorruptLogError: the log no longer has the next record.
            CorruptMessageError: the header is invalid.
        """
        if not is_the_key(header.get("key"), self._key):
            raise AuthError("the key of the standby is wrong; it must be the one in RUN_DIR/standby of the primary")
        match request := decode(header.get("request")):
            case HaveLog():
                return Bulk({**self._have(request), "at": 0, "of": 0}, memoryview(b""))
            case TookOver():
                self._succeed(request)
                return Bulk({"at": 0, "of": 0}, memoryview(b""))
        return self._origin.give(request, header)

    def _have(self, request: HaveLog) -> Json:
        """Store the records that the standby has, and register it when it has all."""
        split_host_port(request.address)
        with self._changed:
            now_s, lsn, address = time.monotonic(), request.lsn, request.address
            if self.address not in (None, address):
                raise ConfigError(
                    f"the run has a standby already, {self.address}, heard {self._rule.silent_s(now_s):.0f} s ago; a "
                    "run has one standby; stop that one, and wait until the run continues without it"
                )
            self.is_followed = True
            if lsn > self._log.durable_lsn:
                lsn = 0  # another history; it asks for missing records, and then copies the run again
            if lsn < self._acked_lsn:  # a new copy
                self._counts_from_lsn = self._log.durable_lsn
            has_all = lsn == self._log.durable_lsn
            is_in_step = has_all or lsn > self._acked_lsn  # a standby without progress counts as silent
            if is_in_step:
                self._rule.heard_standby(now_s)
            self._acked_lsn = lsn
            self._changed.notify_all()
            if self.address is None and has_all:
                self._register(address)
                self._counts_from_lsn = self._log.durable_lsn  # read after: later decisions wait
                log.info("the standby at %s has caught up, and is registered", address)
            self._was_told = self._is_ending and has_all
            counts = self.address == address and is_in_step and lsn >= self._counts_from_lsn
            shards = [shard.place for shard in self._shards]
            return {"counts": counts, "is_over": self._was_told, "reign": self._reign, "shards": shards}

    def _succeed(self, request: TookOver) -> None:
        """Process a takeover, unless this syncer has taken over later."""
        split_host_port(request.address)
        with self._changed:
            if request.reign > self._reign:
                self._reign, self.successor, self.common_lsn = request.reign, request.address, request.lsn
                self._changed.notify_all()
