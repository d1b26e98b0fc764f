"""Reads the records of a log that is being written, one after the other, as bytes to send.

Source: our choice.
"""

from __future__ import annotations

import os

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.storage.log_frames import encode, read_at
from lightning_diloco.storage.redo_log import RedoLog


class LogCursor:
    """A place in a log. It keeps its segment open, so that the log may drop this segment meanwhile.

    Args:
        log: the log; may be written by other threads.
        lsn: the last record before this place.

    Raises:
        CorruptLogError: the record after this place is no longer kept.
    """

    def __init__(self, log: RedoLog, lsn: int) -> None:
        self._log = log
        self.lsn = lsn
        self._first, self._fd = log.open_segment(lsn + 1)
        self._offset = 0
        at = self._first - 1
        while at < lsn:
            at, self._offset = at + 1, self._read(at + 1)[1]

    def take(self, max_bytes: int) -> bytes:
        """Return the next durable records, encoded; at least one if there is one, else about max_bytes."""
        pieces: list[bytes] = []
        num_bytes = 0
        while self.lsn < self._log.durable_lsn and num_bytes < max_bytes:
            piece, end = self._read(self.lsn + 1)
            self.lsn, self._offset = self.lsn + 1, end
            pieces.append(piece)
            num_bytes += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the segment."""
        os.close(self._fd)

    def _read(self, lsn: int) -> tuple[bytes, int]:
        """Return a record, encoded, and the offset of its end."""
        placed = read_at(self._fd, self._offset, os.fstat(self._fd).st_size)
        if placed is None:  # the log continues in the next segment
            first, fd = self._log.open_segment(lsn)
            os.close(self._fd)
            self._first, self._fd, self._offset = first, fd, 0
            placed = read_at(self._fd, 0, os.fstat(self._fd).st_size)
        if placed is None or placed.record.lsn != lsn:
            raise CorruptLogError(
                f"{self._log.directory}: the record of lsn {lsn} is not where it must be; restore the log from a backup"
            )
        record = placed.record
        head, payload = encode(record.lsn, placed.durable_lsn, record.header, record.payload)
        return b"".join((head, payload)), placed.end
