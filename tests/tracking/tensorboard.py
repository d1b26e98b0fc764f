"""Reads files of TensorBoard: records in TensorFlow's format, each with an event as a protocol buffer.

A record: length (8 bytes, little endian), its checksum (4), the bytes, their checksum (4). Source: TensorFlow,
core/lib/io/record_writer.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

_HEAD = struct.Struct("<Q4x")
_CHECKSUM = 4

Series = dict[str, list[tuple[int, float]]]
"""Step and value of each point, by tag."""


def scalars(path: Path) -> Series:
    """Return all scalars of one file."""
    found: Series = {}
    for record in _records(path.read_bytes()):
        event = Event.FromString(record)
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        (length,) = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        yield data[position : position + length]
        position += length + _CHECKSUM
