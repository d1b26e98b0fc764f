"""The tape: the events of a run, one JSON object per line, in order.

1. A line is `{"t": unix seconds, "event": name, "lsn": log sequence number or null, ...}`.
2. Lines are not fsynced one by one. After a crash the tape may lack its end, or be ahead of the log. The syncer then
   cuts the tape to the log (`truncate_after`) and adds missing joins and leaves from the log. It therefore syncs the
   tape before the log drops records.
3. Opening cuts off an incomplete last line, left by a crash. It reads only the end of the tape, which grows by about
   half a kilobyte per commit; a restart reads the whole tape once (`syncer/status/history.py`).

Non-finite numbers are written as in Python: NaN, Infinity.

Source: the paper (Sec. 5) mentions an event tape; the format is our choice.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lightning_diloco.errors import CorruptLogError, StorageError
from lightning_diloco.storage.files import AppendFile, make_directory, storage, whole_lines
from lightning_diloco.transport.base import Json

TAPE = "tape/events.jsonl"  # in a run directory
_MAX = sys.maxsize
_decode = msgspec.json.Decoder().decode
_END_BYTES = 1 << 16


class Tape:
    """An append-only `events.jsonl`; safe to use from several threads.

    Args:
        path: path of the file; created, with its directories, if it does not exist.

    Attributes:
        last_lsn: the highest log sequence number on the tape; 0 if there is none.
        torn_bytes: bytes that were cut off at opening.

    Raises:
        CorruptLogError: the last complete line is not JSON; `read_tape` checks the others.
        StorageError: the file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
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
            event: name of the event.
            lsn: lsn of the log record of the event, which never decreases; None if there is no record.
            late_s: seconds since the event happened.
            **fields: JSON values; `t`, `event` and `lsn` are reserved.

        Raises:
            StorageError: writing failed; the tape is unchanged.
        """
        with self._mutex:
            assert fields.keys().isdisjoint({"t"}), "the tape stamps the time itself"
            assert lsn is None or lsn >= self.last_lsn, f"lsn {lsn} after {self.last_lsn}"
            line = {"t": time.time() - late_s, "event": event, "lsn": lsn, **fields}
            self._file.append([json.dumps(line, separators=(",", ":")).encode() + b"\n"])
            self.last_lsn = max(self.last_lsn, lsn or 0)

    @property
    def nbytes(self) -> int:
        """Size of the tape, in bytes."""
        return self._file.end

    def copy(self, text: bytes, up_to_lsn: int = _MAX) -> list[Json]:
        """Append lines of another tape, and return them; an incomplete last line is left out.

        Args:
            text: lines of the other tape, after those that were copied before.
            up_to_lsn: the first line with a later lsn, and those after it, are left out.

        Raises:
            CorruptLogError: the text does not begin with a line; the tape is unchanged.
        """
        copied, end = list[Json](), 0
        for number, piece in enumerate(text.splitlines(keepends=True), start=1):
            if not piece.endswith(b"\n"):
                break
            line = _parse(self.path, number, piece)
            if (line["lsn"] or 0) > up_to_lsn:
                break
            copied.append(line)
            end += len(piece)
        with self._mutex:
            self._file.append([text[:end]])
            self.last_lsn = max([self.last_lsn, *(line["lsn"] or 0 for line in copied)])
        return copied

    def truncate_after(self, lsn: int) -> int:
        """Cut the tape before the first line with a later lsn.

        Returns:
            The number of bytes cut off.
        """
        with self._mutex:
            if self.last_lsn <= lsn:
                return 0  # without reading the whole tape again
            before = self._file.end
            end = self._measure(up_to_lsn=lsn)
            if end < before:
                self._file.cut(end)
            return before - end

    def sync(self) -> None:
        """Make all lines durable. If this raises `StorageError`, lines since the last sync are removed."""
        with self._mutex:
            self._sync()

    def close(self) -> None:
        """Sync and close the tape; idempotent."""
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
        """Return the end of the last complete line; set `last_lsn`, which never decreases from line to line."""
        num_bytes, size = _END_BYTES, self._file.end
        while num_bytes < size:
            with storage("read", self.path), self.path.open("rb") as file:
                file.seek(size - num_bytes)
                lines = file.read().split(b"\n")
            try:  # the first may be a part of a line, the last is incomplete or empty
                known = (lsn for line in lines[-2:0:-1] if (lsn := _parse(self.path, 0, line)["lsn"]) is not None)
                if (last_lsn := next(known, None)) is not None:
                    self.last_lsn = last_lsn
                    return size - len(lines[-1])
            except CorruptLogError:
                break  # reading all lines gives the number of the damaged line
            num_bytes *= 4
        return self._measure()

    def _measure(self, *, up_to_lsn: int = _MAX, before: int = _MAX) -> int:
        """Return the end of the last complete line within both limits; set `last_lsn` to match."""
        self.last_lsn, end = 0, 0
        for line, line_end in _lines(self.path):
            lsn = line["lsn"] or 0
            if lsn > up_to_lsn or line_end > before:
                break
            self.last_lsn, end = max(self.last_lsn, lsn), line_end
        return end


def read_tape(path: str | os.PathLike[str]) -> Iterator[Json]:
    """Yield the lines of a tape, which may still be written, without an incomplete last line; none if there is no file.

    Raises:
        CorruptLogError: a line other than the last is not JSON.
    """
    if os.path.exists(path):
        for line, _ in _lines(Path(path)):
            yield line


def read_new(path: Path, start: int) -> tuple[list[Json], int]:
    """Return the lines from byte `start` on, and the byte at which the next one begins.

    If the tape is shorter, because it was cut, that is its new end. Errors count the lines from `start`.
    """
    if not path.exists() or path.stat().st_size < start:
        return [], path.stat().st_size if path.exists() else 0
    lines = list(_lines(path, start))
    return [line for line, _ in lines], lines[-1][1] if lines else start


def _lines(path: Path, end: int = 0) -> Iterator[tuple[Json, int]]:
    with storage("read", path):
        for number, text in enumerate(whole_lines(path, end), start=1):
            end += len(text)
            yield _parse(path, number, text), end


def _parse(path: Path, number: int, text: bytes) -> Json:
    try:
        line = _decode(text)  # five times as fast, which matters after a month of training
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            line = json.loads(text)  # NaN and Infinity
        except ValueError:
            line = None
    if not isinstance(line, dict) or not {"t", "event", "lsn"} <= line.keys():
        raise CorruptLogError(
            f"{path}, line {number}, is {text[:60]!r}; a line must be a JSON object with t, event and lsn; restore the "
            f"tape from a backup, or move it away to start a new one from the log"
        )
    return line
