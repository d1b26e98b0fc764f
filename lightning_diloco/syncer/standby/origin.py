"""Sends the newest snapshot and the log of a directory to a standby; used by a primary and each of its shards."""

from __future__ import annotations

import hmac
import json
import mmap
import threading
import time
from pathlib import Path

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.storage.log_cursor import LogCursor
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.storage.snapshots import SnapshotStore
from lightning_diloco.syncer.standby.requests import AskFile, AskListing, AskLog
from lightning_diloco.transport.base import Bulk, Json
from lightning_diloco.transport.portions import asked_range

BATCH_BYTES = 16 << 20
LOOK_S = 0.25
MAX_WAIT_S = 5.0

Asked = AskListing | AskFile | AskLog


class Origin:
    """The files that a standby copies; its methods may be called from several threads.

    Args:
        root: files are named relative to this directory, and no other files are sent.
        snapshots: directory of the snapshots, in `root`.
        redo_log: the log; only durable records are sent.
    """

    def __init__(self, root: Path, snapshots: Path, redo_log: RedoLog) -> None:
        self._root, self._snapshots, self._log = root, snapshots, redo_log
        self._has_records = threading.Condition()
        self._giving = threading.Lock()
        self._cursor: LogCursor | None = None
        self._given: dict[type[Asked], tuple[str, memoryview]] = {}

    def wake(self) -> None:
        """Send new records at once to a standby that waits for them."""
        with self._has_records:
            self._has_records.notify_all()

    def give(self, request: Asked, header: Json) -> Bulk:
        """Return a portion of the requested data.

        Args:
            request: the request.
            header: its header, with {"mark", "span", "at"}; see `portions`.

        Raises:
            CorruptLogError: the log no longer has the next record, or the file is no longer there.
        """
        if isinstance(request, AskLog):
            self._wait_for_record(request)
        mark = str(header.get("mark"))
        with self._giving:
            known, payload = self._given.get(type(request), ("", memoryview(b"")))
            if known != mark:
                payload = self._content(request)
                self._given[type(request)] = mark, payload
        start, stop = asked_range(header, payload.nbytes)
        return Bulk({"at": start, "of": payload.nbytes}, payload[start:stop])

    def close(self) -> None:
        """Close the log, and drop prepared answers."""
        with self._giving:
            self._forget()

    def _content(self, request: Asked) -> memoryview:
        match request:
            case AskListing():
                return memoryview(json.dumps(self._listing()).encode())
            case AskFile():
                return self._file_from(request.name, request.start)
            case AskLog():
                return self._log_after(request.after)

    def _listing(self) -> Json:
        """Return the files of the newest snapshot; none if there are no start values yet."""
        snapshots = SnapshotStore(self._snapshots)
        if not (lsns := snapshots.lsns()):
            return {"lsn": None, "files": []}
        files = sorted(path.relative_to(self._root).as_posix() for path in snapshots.path(lsns[-1]).iterdir())
        return {"lsn": lsns[-1], "files": files}

    def _file_from(self, name: str, start: int) -> memoryview:
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root.resolve()) or not path.is_file():
            raise CorruptLogError(f"{name!r} is not, or no longer, a file of this run; begin the copy again")
        with path.open("rb") as file:
            if not path.is_relative_to(self._snapshots.resolve()):  # it may become shorter, like a tape
                file.seek(start)
                return memoryview(file.read())
            size = path.stat().st_size
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
        return whole[start:]

    def _wait_for_record(self, request: AskLog) -> None:
        until_s = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        with self._has_records:
            while self._log.durable_lsn <= request.after and (left_s := until_s - time.monotonic()) > 0:
                self._has_records.wait(min(left_s, LOOK_S))

    def _log_after(self, lsn: int) -> memoryview:
        """Return the next records, encoded; none if there is none."""
        if self._cursor is None or self._cursor.lsn != lsn:
            self._forget()
            self._cursor = LogCursor(self._log, lsn)
        return memoryview(self._cursor.take(BATCH_BYTES))

    def _forget(self) -> None:
        """Close the log, and drop prepared answers. Needs `_giving`."""
        cursor, self._cursor = self._cursor, None
        self._given.clear()
        if cursor is not None:
            cursor.close()


def is_the_key(sent: object, key: str) -> bool:
    """Return whether a caller has sent the key of the run's standby; never if there is none."""
    return bool(key) and hmac.compare_digest(str(sent).encode(errors="replace"), key.encode())
