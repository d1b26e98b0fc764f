"""Reads the redo log of a run, without code of the package (`recorded_run.py`).

1. The numbers of the records have no gap. If the log was cut, a snapshot holds the state before its first record.
2. What is not as a run writes it is an UnreadableError, which says in a sentence what was found, and where.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_FRAME = struct.Struct("<8sBxxxIQQQII")  # magic, version, header and payload bytes, lsn, durable lsn, two checksums


class UnreadableError(Exception):
    """A file is not what a run writes."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    try:
        yield
    except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise UnreadableError(f"{what} is not as a run writes it: {type(error).__name__}: {error}") from error


def records(run_dir: Path) -> tuple[Json | None, list[Json]]:
    """Return the state that the log begins with (None: nothing), and its records.

    Raises:
        UnreadableError: a file or a record is missing or damaged.
    """
    folder, found = run_dir / "syncer" / "log", list[Json]()
    for path in sorted(folder.glob("*.log")):
        with reading(path):
            found += _frames(path.read_bytes())
    if not found:
        what = "holds no records" if folder.is_dir() else "is missing"
        raise UnreadableError(f"{folder} {what}")
    first = found[0]["lsn"]
    for lsn, record in enumerate(found, first):
        if record["lsn"] != lsn:
            raise UnreadableError(f"the log is not whole: record {record['lsn']} follows record {lsn - 1}")
    if first == 1:
        return None, found
    before = run_dir / "syncer" / "snapshot" / f"{first - 1:020}" / "state.json"
    if not before.exists():
        raise UnreadableError(f"the log begins with record {first}, and there is no {before}")
    with reading(before):
        return json.loads(before.read_text())["machine"], found


def _frames(data: bytes) -> Iterator[Json]:
    at = 0
    while at < len(data):
        frame = data[at : at + _FRAME.size]
        if not frame.startswith(b"DLCOredo"):
            raise ValueError(f"no record at byte {at}")
        if len(frame) < _FRAME.size:
            raise ValueError(f"the record at byte {at} is cut off")
        _, _, header_bytes, payload_bytes, lsn, _, checksum, checksum_of_frame = _FRAME.unpack(frame)
        if zlib.crc32(frame[:-4]) != checksum_of_frame:
            raise ValueError(f"the record at byte {at} is damaged")
        begin, at = at + _FRAME.size, at + _FRAME.size + header_bytes + payload_bytes
        if at > len(data):
            raise ValueError(f"record {lsn} is cut off")
        if zlib.crc32(data[begin:at]) != checksum:
            raise ValueError(f"record {lsn} is damaged")
        yield {**json.loads(data[begin : begin + header_bytes]), "lsn": lsn}
