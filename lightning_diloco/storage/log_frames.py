"""The format of a record in the redo log, and the detection of damaged records.

Little endian:

    magic | version | header length | payload length | lsn | durable lsn | checksum of header and payload
    checksum of the line above | header (JSON) | payload (raw bytes)

The lengths have their own checksum, so the next record can be found after a damaged payload. `durable lsn` is the last
durable record at the time of writing; it distinguishes a torn end from corruption.

Source: our choice.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_diloco.errors import StorageError
from lightning_diloco.storage.files import Buffer
from lightning_diloco.transport.base import Json

_MAGIC = b"DLCOredo"
_VERSION = 2
_PREFIX = struct.Struct("<8sBxxxIQQQI")
_CHECKSUM = struct.Struct("<I")
_PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size
_SEARCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the log.

    Args:
        lsn: log sequence number.
        header: the JSON object given to `RedoLog.append`.
        payload: the raw bytes given to `RedoLog.append`; empty if there were none.
    """

    lsn: int
    header: Json
    payload: bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """A record, the offset of its end in the file, and the durable lsn when it was written."""

    record: Record
    end: int
    durable_lsn: int


def encode(lsn: int, durable_lsn: int, header: Mapping[str, object], payload: Buffer) -> tuple[bytes, memoryview]:
    """Encode a record; return the bytes before the payload, and the payload without a copy.

    Raises:
        ValueError: the header holds NaN or Inf.
    """
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    body = memoryview(payload).cast("B")
    checksum = zlib.crc32(body, zlib.crc32(text))
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(text), body.nbytes, lsn, durable_lsn, checksum)
    return prefix + _CHECKSUM.pack(zlib.crc32(prefix)) + text, body


def read_at(source: int | memoryview, offset: int, size: int) -> Placed | None:
    """Read the record at an offset; return None if it is incomplete or damaged.

    Args:
        source: the descriptor of a file, or bytes.
        offset: where the record begins.
        size: size of the source, in bytes.

    Raises:
        StorageError: the record has a format that this version cannot read.
    """
    head = _head_at(source, offset)
    if head is None or head.end > size:
        return None
    header_at = offset + _PREFIX_BYTES
    text = bytes_at(source, header_at, head.header_bytes)
    payload = bytes_at(source, header_at + head.header_bytes, head.payload_bytes)
    if zlib.crc32(payload, zlib.crc32(text)) != head.checksum:
        return None
    return Placed(Record(head.lsn, json.loads(text), payload), head.end, head.durable_lsn)


def extent_at(fd: int, offset: int) -> tuple[int, int] | None:
    """Return lsn and end of the record at an offset, without a check of its content; None if there is no record.

    Raises:
        StorageError: the record has a format that this version cannot read.
    """
    head = _head_at(fd, offset)
    return None if head is None else (head.lsn, head.end)


@dataclass(frozen=True, slots=True)
class _Head:
    header_bytes: int
    payload_bytes: int
    lsn: int
    durable_lsn: int
    checksum: int
    end: int


def _head_at(source: int | memoryview, offset: int) -> _Head | None:
    line = bytes_at(source, offset, _PREFIX_BYTES)
    if len(line) < _PREFIX_BYTES or line[_PREFIX.size :] != _CHECKSUM.pack(zlib.crc32(line[: _PREFIX.size])):
        return None
    magic, version, header_bytes, payload_bytes, lsn, durable_lsn, checksum = _PREFIX.unpack_from(line)
    if magic != _MAGIC:
        return None
    if version != _VERSION:
        raise StorageError(
            f"the log has format {version}, this version reads format {_VERSION}; use the version that wrote it"
        )
    end = offset + _PREFIX_BYTES + header_bytes + payload_bytes
    return _Head(header_bytes, payload_bytes, lsn, durable_lsn, checksum, end)


def was_durable(fd: int, offset: int, size: int, lsn: int) -> bool:
    """Return whether a later record shows that `lsn` was durable."""
    while (offset := _next_magic(fd, offset + 1, size)) >= 0:
        placed = read_at(fd, offset, size)
        if placed is not None and placed.durable_lsn >= lsn:
            return True
    return False


def _next_magic(fd: int, offset: int, size: int) -> int:
    while offset < size:
        window = bytes_at(fd, offset, _SEARCH_BYTES)
        if (found := window.find(_MAGIC)) >= 0:
            return offset + found
        # Windows overlap, so that the search finds a magic at their border.
        offset += max(1, len(window) - len(_MAGIC) + 1)
    return -1


def bytes_at(source: int | memoryview, offset: int, num_bytes: int) -> bytes:
    """Return this number of bytes of a file or buffer from an offset on; fewer at its end."""
    if isinstance(source, memoryview):
        return bytes(source[offset : offset + num_bytes])
    pieces = []
    while num_bytes and (piece := os.pread(source, num_bytes, offset)):
        pieces.append(piece)
        offset += len(piece)
        num_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
