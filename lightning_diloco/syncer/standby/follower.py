"""The standby: follows the primary, and decides when to take over.

1. RUN_DIR/syncer/standby_of names the primary as long as this directory is a standby's. At a takeover it becomes
   `taken_from`, so that a restart serves the run, and tells the former primary.
2. The standby keeps log, anchors and state machine as the primary does, record by record. It takes over from memory.
   While it writes and applies records, the next ones are on their way. Records are reported when they are on disk,
   before they are applied.
3. Learners that ask are refused with a `StandbyError`, and counted (`protocol/syncer/succession.py`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lightning_diloco.errors import CorruptLogError, RemoteError, RestoringError, StandbyError, TransportError
from lightning_diloco.process.threads import unless
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.protocol.syncer.succession import Standby
from lightning_diloco.storage.files import storage, sync_directory
from lightning_diloco.storage.log_frames import Record
from lightning_diloco.storage.tape import TAPE
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.shards.layout import num_shards_of
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.reign import forget_reign_after, reign, set_reign
from lightning_diloco.syncer.standby.replica import forget_standby
from lightning_diloco.syncer.standby.shards import StandbyShards
from lightning_diloco.syncer.standby.source import Source, copy_run, cut_to_common, is_copied
from lightning_diloco.syncer.store import SyncerStore
from lightning_diloco.transport.address import write_private

log = logging.getLogger(__name__)

POLL_S = 1.0
REPORT_S = 0.5
LOOK_S = 0.1
AHEAD = 1
AGAIN_S = 0.2
SAY_EVERY_S = 30.0
_MARKER, _TAKEN = "standby_of", "taken_from"


def primary_of(run_dir: Path) -> Invitation | None:
    """Return the primary that this directory is a standby of; None if it is not one."""
    marker = run_dir / "syncer" / _MARKER
    return Invitation.parse(marker.read_text()) if marker.exists() else None


def become_standby(run_dir: Path, primary: Invitation) -> None:
    """Make this directory a standby's, durably."""
    folder = run_dir / "syncer"
    with storage("write", folder / _MARKER):
        write_private(folder / _MARKER, primary.text().encode())
        (folder / _TAKEN).unlink(missing_ok=True)
        forget_reign_after(run_dir)
        sync_directory(folder)
    forget_standby(run_dir)


def become_primary(run_dir: Path) -> None:
    """Make the directory of a standby a primary's, durably, in the next reign; its former primary stays known."""
    folder = run_dir / "syncer"
    if (folder / _MARKER).exists():
        set_reign(run_dir, reign(run_dir) + 1)
        with storage("rename", folder / _MARKER):
            (folder / _MARKER).rename(folder / _TAKEN)
            sync_directory(folder)


def taken_from(run_dir: Path) -> Invitation | None:
    """Return the primary that this directory took over from; None if it never did, or is a standby's again."""
    marker = run_dir / "syncer" / _TAKEN
    return Invitation.parse(marker.read_text()) if marker.exists() else None


@dataclass(frozen=True, slots=True)
class Followed:
    """A run as its standby has it at a takeover."""

    durable: SyncerStore
    state: SyncerState
    store: AnchorStore


class _Fetch:
    """A thread that fetches the records of the primary's log after an lsn, at most AHEAD batches ahead."""

    def __init__(self, source: Source, lsn: int) -> None:
        self._source = source
        self._ended = threading.Event()
        self._found: queue.Queue[list[Record] | Exception] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._run, args=(lsn,), name="diloco-fetch", daemon=True)
        self._thread.start()

    def take(self) -> list[Record]:
        """Return the next records; none if there is none within LOOK_S.

        Raises:
            TransportError, CorruptLogError: the error that ended the thread.
        """
        try:
            found = self._found.get(timeout=LOOK_S)
        except queue.Empty:
            return []
        if isinstance(found, Exception):
            raise found
        return found

    def end(self, within_s: float) -> None:
        """End the thread after its present call, and wait for it.

        If a call returned during the shutdown of the interpreter, it would crash the process.
        """
        self._ended.set()
        self._thread.join(within_s)

    def _run(self, lsn: int) -> None:
        while not self._ended.is_set():
            try:
                found = self._source.log_after(lsn, POLL_S)
            except Exception as error:  # raised again by `take`
                self._put(error)
                return
            if found:
                self._put(found)
                lsn = found[-1].lsn

    def _put(self, found: list[Record] | Exception) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                return self._found.put(found, timeout=LOOK_S)


class Follower:
    """Follows a primary.

    Args:
        run_dir: RUN_DIR of this standby.
        source: connection to the primary.
        address: `host:port` of this standby.
        is_stopping: returns whether this process was asked to stop.
        expect: number of learners that must finish; None: unknown.
        shards: the other shards of this standby; none if the run has one shard.
    """

    def __init__(
        self,
        run_dir: Path,
        source: Source,
        address: str,
        is_stopping: Callable[[], bool],
        *,
        expect: int | None = None,
        shards: Sequence[RemoteShard] = (),
    ) -> None:
        self._run_dir, self._source, self._address = run_dir, source, address
        self._is_stopping, self._expect = is_stopping, expect
        self._shards = StandbyShards(shards, source.primary)
        self._rule = Standby()
        self._run: Followed | None = None
        self._fetch: _Fetch | None = None
        self._reign = reign(run_dir)
        self._held: list[Record] = []  # a shard lacks the outer gradient of the first one
        self._reported_s = -REPORT_S
        self._copies_tape = True
        self._said_s = -SAY_EVERY_S
        self._is_over = False

    def asked(self, session: str | None) -> None:
        """Refuse a call of a learner, and count it."""
        if session is not None:
            self._rule.asked(session, time.monotonic())
        raise StandbyError(
            f"the syncer at {self._address} is the standby of this run, and does not serve it; nothing of the call was "
            "used; it takes over if the primary is silent and more than half of the learners ask it"
        )

    def run(self) -> Followed | None:
        """Follow the primary until this standby takes over.

        Returns:
            The run, which this process must serve now; None if the run is over, or this process was asked to stop.

        Raises:
            ConfigError: the primary has another standby, or another number of shards.
            AuthError: wrong token or key.
            CorruptLogError: this directory is damaged, or the primary has another version of this package.
            StorageError: the disk failed.
        """
        if is_copied(self._run_dir):
            self._open()
        try:
            while not self._is_over and not self._is_stopping():
                try:
                    if self._run is None:
                        self._copy()
                    elif self._may_take_over():
                        return self._handed_over()
                    else:
                        self._follow(self._run)
                except TransportError as error:
                    self._say(error)
                    self._is_over = self._has_missed_the_end()
                    time.sleep(AGAIN_S)
        finally:
            self._shards.end(is_over=self._is_over)
            self._close()
        return None

    def _handed_over(self) -> Followed | None:
        """Return the run, without its records on the way; the primary has not announced them."""
        if self._fetch is not None:
            self._fetch.end(within_s=0.0)
        self._held = []
        found, self._run, self._fetch = self._run, None, None
        return found

    def _copy(self) -> None:
        """Copy the run, unless the records of this directory can be kept, and open it."""
        try:
            is_whole = cut_to_common(self._source, self._run_dir) or copy_run(
                self._source, self._run_dir, self._is_stopping
            )
        except CorruptLogError as error:  # the primary has replaced its snapshot meanwhile
            log.warning("copying the run again: %s", error)
            return
        if is_whole:
            self._open()

    def _follow(self, run: Followed) -> None:
        """Take the next records, if there are any, and report to the primary."""
        self._fetch = self._fetch or _Fetch(self._source, run.durable.log.last_lsn)
        self._shards.open(run.state)
        try:
            taken = self._held or self._fetch.take()
        except CorruptLogError as error:  # the primary has dropped these records, or this is another history
            log.warning("copying the run again: %s", error)
            self._close()
            return
        except TransportError:
            self._fetch = None
            raise
        num = self._shards.num_complete(taken, LOOK_S)
        copied, self._held = taken[:num], taken[num:]
        if copied:
            run.durable.log.copy(copied)
            self._shards.wrote(copied)
        try:
            if copied or time.monotonic() - self._reported_s >= REPORT_S:
                self._report(run)
        finally:
            run.durable.follow(copied, run.state, run.store)
        if copied and run.durable.is_snapshot_due(run.store):
            run.durable.begin_snapshot(codec.dump(run.state.saved()), cast("Json", run.state.manifest), run.store)

    def _report(self, run: Followed) -> None:
        """Tell the primary which records are on disk, and copy its tape, unless it is time to take over first."""
        self._reported_s = sent_s = time.monotonic()
        lsn = run.durable.log.last_lsn if self._shards.have_all else 0
        answer = unless(self._is_futile, lambda: self._source.have(lsn, self._address))
        if answer is None:
            return
        self._shards.know(answer["shards"])
        if answer["reign"] != self._reign:
            self._reign = answer["reign"]
            set_reign(self._run_dir, self._reign)
        if answer["counts"]:
            self._rule.answered(sent_s, time.monotonic())
        self._is_over = answer["is_over"]
        self._copy_tape(run)

    def _copy_tape(self, run: Followed) -> None:
        start = run.durable.tape.nbytes
        try:
            text = unless(self._is_futile, lambda: self._source.file(TAPE, start)) if self._copies_tape else None
            if text is not None:
                run.durable.follow_tape(bytes(text))
        except CorruptLogError as error:  # the primary was restarted, and has cut its tape
            log.warning("the tape is not copied any more, so that history of the run will be missing: %s", error)
            self._copies_tape = False

    def _is_futile(self) -> bool:
        return self._is_stopping() or self._may_take_over()

    def _may_take_over(self) -> bool:
        assert self._run is not None
        return self._shards.have_all and self._rule.may_take_over(self._run.state.roster.fleet(), time.monotonic())

    def _has_missed_the_end(self) -> bool:
        """Return whether the primary is gone because the run is over, as far as the log shows."""
        if self._run is None or self._expect is None or self._rule.is_fresh(time.monotonic()):
            return False
        roster = self._run.state.roster
        finished = {member.learner for member in roster.in_state("left") if member.ending == "finished"}
        return not roster.live() and len(finished) >= self._expect

    def _say(self, error: RemoteError) -> None:
        """Log from time to time why this standby does not follow."""
        now_s = time.monotonic()
        if isinstance(error, RestoringError) or now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        log.warning("the primary cannot be followed: %s", error)
        if self._run is not None and not self._rule.is_fresh(now_s):
            log.warning(
                "the primary may have continued without this standby. If it is lost: diloco syncer --run-dir %s "
                "--take-over",
                self._run_dir,
            )

    def _open(self) -> None:
        state, durable = SyncerState(run=""), SyncerStore(self._run_dir, num_shards=num_shards_of(self._run_dir))
        store = durable.load(state, time.monotonic())
        if store is None:
            durable.close()
            raise CorruptLogError(f"{self._run_dir} has no start values; start the standby in a new directory")
        self._run = Followed(durable, state, store)

    def _close(self) -> None:
        if self._fetch is not None:
            self._fetch.end(within_s=POLL_S + 1.0)
            self._fetch = None
        self._rule = Standby()  # a new copy has to catch up first
        self._shards.close()
        self._held = []
        run, self._run = self._run, None
        if run is not None:
            run.durable.close()
