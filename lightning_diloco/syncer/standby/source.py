"""The standby's view of the primary: copies its files and log over the network.

1. A copy replaces the files of the run when it is complete (`replacement.py`). So a standby that was the primary before
   keeps its own files until it has newer ones.
2. The log of a copy begins after its snapshot.
3. A standby that was the primary before cuts off the records that its successor does not have, and follows from there.
   If it cannot, for example because its snapshot is newer, or the successor has dropped its log, it copies the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lightning_diloco.errors import CorruptLogError, StorageError, TransportError
from lightning_diloco.process.threads import unless
from lightning_diloco.protocol import codec
from lightning_diloco.storage.files import make_directory, storage, sync_directory, write_whole
from lightning_diloco.storage.log_frames import Record, read_at
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.storage.snapshots import SnapshotStore
from lightning_diloco.storage.tape import TAPE
from lightning_diloco.syncer import replacement
from lightning_diloco.syncer.shards.layout import holds_run
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.requests import STANDBY, AskFile, AskListing, AskLog, HaveLog, Request, TookOver
from lightning_diloco.transport.base import Connection, Json
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.portions import Portioned

log = logging.getLogger(__name__)

CALL_S = 5.0
BULK_S = 600.0
LOG_S = 60.0  # time limit of a call for BATCH_BYTES, or for a portion of one record
NOT_YET_S = 0.5
IDENTITY = "syncer/identity.pem"


class Source:
    """A connection to the primary.

    Args:
        invitation: address and key.
        connection: makes calls; None connects to the address.

    Attributes:
        primary: address and key.
    """

    def __init__(self, invitation: Invitation, connection: Connection | None = None) -> None:
        self.primary, self._key = invitation, invitation.key
        self._connection = connection or FlightConnection(invitation.address)
        self._large = Portioned(self._connection)

    def file(self, name: str, start: int = 0) -> memoryview:
        """Return a file of the run directory, from byte `start` on."""
        return self._download(AskFile(name, start), BULK_S)

    def log_after(self, lsn: int, wait_s: float) -> list[Record]:
        """Return the records of the log after this one.

        Args:
            lsn: the last record that this standby has.
            wait_s: how long the primary waits for a record, if there is none.
        """
        payload = self._download(AskLog(lsn, wait_s), wait_s + LOG_S)
        found, offset = list[Record](), 0
        while offset < payload.nbytes:
            placed = read_at(payload, offset, payload.nbytes)
            if placed is None or placed.record.lsn != lsn + 1:
                raise CorruptLogError(f"the records after {lsn} arrived damaged; begin the copy again")
            found.append(placed.record)
            lsn, offset = lsn + 1, placed.end
        return found

    def have(self, lsn: int, address: str) -> Json:
        """Report the last record on this standby's disk; see `HaveLog` for arguments and result."""
        with _of_the_primary():
            return self._connection.get(self._header(HaveLog(lsn, address)), deadline_s=CALL_S).header

    def took_over(self, request: TookOver) -> None:
        """Tell the former primary of a takeover."""
        self._connection.get(self._header(request), deadline_s=CALL_S)

    def listing(self) -> Json:
        """Return lsn and file names of the newest snapshot; the lsn is null if the run has no start values yet."""
        found: Json = json.loads(bytes(self._download(AskListing(), CALL_S)))
        return found

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _download(self, request: Request, deadline_s: float) -> memoryview:
        with _of_the_primary():
            return self._large.get(self._header(request), deadline_s=deadline_s).payload

    def _header(self, request: Request) -> Json:
        return {"what": STANDBY, "key": self._key, "request": codec.dump(request)}


@contextlib.contextmanager
def _of_the_primary() -> Iterator[None]:
    """Convert a temporary error of the primary's disk; only CorruptLogError means that a copy must begin again."""
    try:
        yield
    except CorruptLogError:
        raise
    except StorageError as error:
        raise TransportError(f"the primary's disk: {error}") from error


def copy_identity(source: Source, run_dir: Path) -> None:
    """Copy the certificate of the run, if it is not there yet."""
    if not (run_dir / IDENTITY).exists():
        make_directory(run_dir / "syncer")
        write_whole(run_dir / IDENTITY, source.file(IDENTITY))


def num_shards_at(source: Source) -> int:
    """Return the number of shards of the primary's run."""
    try:
        return int(bytes(source.file("syncer/num_shards")))
    except CorruptLogError:  # a run with one shard has no such file
        return 1


def copy_run(source: Source, run_dir: Path, is_stopping: Callable[[], bool]) -> bool:
    """Copy snapshot and tape of a run; return False if the caller stops first.

    The run needs start values, and this waits for them.
    """
    copy = replacement.begin(run_dir)
    if (found := source.listing())["lsn"] is None:
        log.info("the run has no start values yet; waiting for the first learner")
    while found["lsn"] is None:
        if is_stopping():
            return False
        time.sleep(NOT_YET_S)
        found = source.listing()
    log.info("copying the run, %d files", len(found["files"]))
    places = {name: copy / Path(name).relative_to("syncer") for name in found["files"]} | {TAPE: copy / TAPE}
    for name, path in places.items():
        content = unless(is_stopping, partial(source.file, name))
        if content is None:
            return False
        replacement.add(path, content)
    replacement.begin_log(copy / "log", found["lsn"] + 1)
    replacement.complete(run_dir)
    return True


def is_copied(run_dir: Path) -> bool:
    """Return whether the log of this directory is a part of its primary's, so that following it can continue."""
    return holds_run(run_dir) and not (run_dir / replacement.OUTDATED).exists()


def differs_after(run_dir: Path, lsn: int) -> None:
    """Record, durably, that the log of this directory may differ from its new primary's after this record."""
    write_whole(run_dir / replacement.OUTDATED, str(lsn).encode())


def cut_to_common(source: Source, run_dir: Path) -> bool:
    """Cut off records that the primary does not have; return False if the run must be copied.

    Raises:
        TransportError: the primary cannot be reached.
    """
    outdated = run_dir / replacement.OUTDATED
    if not outdated.exists():
        return False
    lsn, snapshots = int(outdated.read_text() or 0), SnapshotStore(run_dir / "syncer" / "snapshot").lsns()
    if not snapshots or snapshots[-1] > lsn:
        return False
    try:
        if not _cut_log(source, run_dir, lsn):
            return False
    except CorruptLogError as error:  # this directory is damaged, or the primary has dropped its log
        log.warning("this directory cannot be continued, and the run is copied: %s", error)
        return False
    write_whole(run_dir / TAPE, source.file(TAPE))  # its own tape has lines that the primary's tape lacks
    with storage("remove", outdated):
        outdated.unlink()
        sync_directory(outdated.parent)
    log.info("this directory keeps its records up to %d, and follows the primary from there", lsn)
    return True


def _cut_log(source: Source, run_dir: Path, lsn: int) -> bool:
    """Cut the log after this record, if the primary has the same one; return whether it has."""
    redo_log = RedoLog(run_dir / "syncer" / "log")
    try:
        if not redo_log.first_lsn <= lsn <= redo_log.last_lsn:
            return False
        own, theirs = next(redo_log.records(lsn)), source.log_after(lsn - 1, 0.0)[:1]
        if [(record.header, bytes(record.payload)) for record in theirs] != [(own.header, bytes(own.payload))]:
            return False
        redo_log.cut_after(lsn)
        return True
    finally:
        redo_log.close()
