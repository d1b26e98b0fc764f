"""Reads the records of a log that is being written, one after the other, as bytes to send.

Source: our choice.
"""

from __future__ import annotations

import os

from lightning_diloco.errors import CorruptLogError
from lightning_diloco.storage.log_frames import bytes_at, extent_at
from lightning_diloco.storage.redo_log import RedoLog


class LogCursor:
    """A position in a log. It keeps its segment open, so that the log may drop the segment meanwhile.

    The receiver checks the content of records (`log_frames.read_at`).

    Args:
        log: the log; may be written by other threads.
        lsn: the last record before this position.

    Raises:
        CorruptLogError: the record after this position is no longer kept.
    """

    def __init__(self, log: RedoLog, lsn: int) -> None:
        self._log = log
        self.lsn = lsn
        first, self._fd = log.open_segment(lsn + 1)
        self._offset = 0
        try:
            for skipped in range(first, lsn + 1):
                self._offset = self._end_of(skipped)
        except BaseException:
            self.close()
            raise

    def take(self, max_bytes: int) -> bytes:
        """Return the next durable records, encoded; at least one if there is one, else about max_bytes."""
        pieces: list[bytes] = []
        num_bytes = 0
        while self.lsn < self._log.durable_lsn and num_bytes < max_bytes:
            end = self._end_of(self.lsn + 1)
            pieces.append(bytes_at(self._fd, self._offset, end - self._offset))
            self.lsn, self._offset = self.lsn + 1, end
            num_bytes += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the segment."""
        os.close(self._fd)

    def _end_of(self, lsn: int) -> int:
        """Return the end of the next record; switch to the next segment if there is one."""
        found = extent_at(self._fd, self._offset)
        if found is None:
            _, fd = self._log.open_segment(lsn)
            os.close(self._fd)
            self._fd, self._offset = fd, 0
            found = extent_at(fd, 0)
        if found is None or found[0] != lsn:
            raise CorruptLogError(
                f"{self._log.directory}: the record of lsn {lsn} is not where it must be; restore the log from a backup"
            )
        return found[1]
