"""The tape: what happened in a run, one JSON object per line, in the order it happened.

1. A line is `{"t": unix seconds, "event": name, "lsn": log sequence number or null, ...}`.
2. The tape is not fsynced line by line: after a crash it may lack its end, or be ahead of a log that lost its own. It
   is then cut to the log (`truncate_after`), and who joined and left is completed from it. Therefore it is synced
   before the log drops records.
3. A line without its end, left by a crash, is cut at opening, which reads no more than the end of a tape: it grows by
   about half a kilobyte with each commit, and a restart reads all of it once (`syncer/status/history.py`).

Non-finite numbers are written as Python writes them: NaN, Infinity.

Source: the paper (Sec. 5) names an event tape; its form is our choice.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage.files import AppendFile, make_directory, storage
from lightning_diloco.transport.base import Json

_MAX = sys.maxsize
_END_BYTES = 1 << 16


class Tape:
    """An append-only `events.jsonl`; safe to use from several threads.

    Args:
        path: created, with its directories, if it is not there.
        clock: wall-clock time in unix seconds.

    Attributes:
        last_lsn: the highest log sequence number on the tape; 0 if there is none.
        torn_bytes: what was cut off at opening.

    Raises:
        CorruptLogError: the last whole line is not JSON; `read_tape` looks at the others.
        StorageError: the file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._mutex = threading.Lock()
        self.last_lsn = 0
        make_directory(self.path.parent)
        self._file = AppendFile(self.path)
        try:
            end = self._measure_end()
            self.torn_bytes = self._file.end - end
            if self.torn_bytes:
                self._file.cut(end)
        except BaseException:
            self._file.close()
            raise

    def record(self, event: str, *, lsn: int | None, late_s: float = 0.0, **fields: object) -> None:
        """Write one line.

        Args:
            event: its name.
            lsn: the log record it tells of; None if it is in no log. Never lower than one already on the tape.
            late_s: how long ago it happened; a disk that was slow may have held it up.
            **fields: JSON values; `t`, `event` and `lsn` are taken.

        Raises:
            StorageError: the disk did not take it; the tape is as before.
        """
        with self._mutex:
            assert fields.keys().isdisjoint({"t"}), "the tape stamps the time itself"
            assert lsn is None or lsn >= self.last_lsn, f"lsn {lsn} after {self.last_lsn}"
            line = {"t": self._clock() - late_s, "event": event, "lsn": lsn, **fields}
            self._file.append([json.dumps(line, separators=(",", ":")).encode() + b"\n"])
            self.last_lsn = max(self.last_lsn, lsn or 0)

    def truncate_after(self, lsn: int) -> int:
        """Cut the tape before the first line that tells of a later log record.

        Returns:
            The bytes cut off.
        """
        with self._mutex:
            if self.last_lsn <= lsn:
                return 0  # without reading all of it once more
            before = self._file.end
            end = self._measure(up_to_lsn=lsn)
            if end < before:
                self._file.cut(end)
            return before - end

    def sync(self) -> None:
        """Make every line durable, or take back those since the last sync; raises `StorageError`."""
        with self._mutex:
            self._sync()

    def close(self) -> None:
        """Make the tape durable and let go of it; idempotent."""
        with self._mutex:
            if self._file.is_open:
                try:
                    self._sync()
                finally:
                    self._file.close()

    def _sync(self) -> None:
        try:
            self._file.sync()
        except StorageError:
            self._measure(before=self._file.end)
            raise

    def _measure_end(self) -> int:
        """Where the last whole line ends; sets `last_lsn`, which never falls from line to line."""
        num_bytes, size = _END_BYTES, self._file.end
        while num_bytes < size:
            with storage("read", self.path), self.path.open("rb") as file:
                file.seek(size - num_bytes)
                lines = file.read().split(b"\n")
            try:  # the first is a part of one, the last is torn, or nothing
                known = (lsn for line in lines[-2:0:-1] if (lsn := _parse(self.path, 0, line)["lsn"]) is not None)
                if (last_lsn := next(known, None)) is not None:
                    self.last_lsn = last_lsn
                    return size - len(lines[-1])
            except CorruptLogError:
                break  # the line's number is told by who counts them
            num_bytes *= 4
        return self._measure()

    def _measure(self, *, up_to_lsn: int = _MAX, before: int = _MAX) -> int:
        """Where the last whole line before this byte and of no later lsn ends; sets `last_lsn` to match."""
        self.last_lsn, end = 0, 0
        for line, line_end in _lines(self.path):
            lsn = line["lsn"] or 0
            if lsn > up_to_lsn or line_end > before:
                break
            self.last_lsn, end = max(self.last_lsn, lsn), line_end
        return end


def read_tape(path: str | os.PathLike[str]) -> Iterator[Json]:
    """The lines of a tape, also of one still being written; an unfinished last line is left out.

    Raises:
        CorruptLogError: a line other than the last is not JSON.
    """
    for line, _ in _lines(Path(path)):
        yield line


def _lines(path: Path) -> Iterator[tuple[Json, int]]:
    end = 0
    with storage("read", path), path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            end += len(text)
            yield _parse(path, number, text), end


def _parse(path: Path, number: int, text: bytes) -> Json:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict) or not {"t", "event", "lsn"} <= line.keys():
        raise CorruptLogError(
            f"{path}, line {number}, is {text[:60]!r}; a line must be a JSON object with t, event and lsn; restore the "
            f"tape from a backup, or move it away and let it begin anew from the log"
        )
    return line
