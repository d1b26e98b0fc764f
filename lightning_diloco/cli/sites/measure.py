"""Measures a machine and its link to a syncer: round trip, bytes per second, memory and disk.

1. A transfer consists of calls with payloads that the syncer drops (up) or generates (down). Payloads are doubled until
   a call takes PROBE_S. Several calls at once use several TCP connections ("streams"), as in a real exchange.
2. The number of streams is doubled as long as this makes the link faster by FASTER; see `transport/streams.py`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_diloco.transport.base import Bulk, Connection, Json
from lightning_diloco.transport.frames import MAX_PROBE_BYTES
from lightning_diloco.transport.streams import FASTER, MAX_STREAMS

PROBE_S = 0.5
DEADLINE_S = 60.0
_FIRST_BYTES = 64 << 10
_NUM_ROUND_TRIPS = 11
_COPY_BYTES, _NUM_COPIES = 128 << 20, 5
_DISK_BYTES, _WRITE_BYTES = 256 << 20, 16 << 20


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of a link in one direction.

    Args:
        bytes_per_s: rate of all streams together.
        num_streams: number of simultaneous transfers.
        seconds: duration of the transfers.
    """

    bytes_per_s: float
    num_streams: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link: median round trip, and the rate in each direction."""

    round_trip_s: float
    up: Rate
    down: Rate


class Way:
    """The link to a syncer or a shard.

    Args:
        connection: used by several threads at once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._header: Json = {"what": "probe", "session": f"doctor-{os.getpid()}"}

    def measured(self) -> Link:
        """Measure the median time of a call without a payload, and the rate in each direction."""
        round_trip_s = statistics.median(_timed(lambda: self._down(1)) for _ in range(_NUM_ROUND_TRIPS))
        return Link(round_trip_s, _rate(self._up), _rate(self._down))

    def _up(self, num_bytes: int) -> None:
        self._connection.put(Bulk(self._header, memoryview(bytes(num_bytes))), deadline_s=DEADLINE_S)

    def _down(self, num_bytes: int) -> None:
        self._connection.get({**self._header, "num_bytes": num_bytes}, deadline_s=DEADLINE_S)


def memory_bytes_per_s(num_threads: int) -> float:
    """Return the bytes per second that the memory moves, read and written, while all threads copy."""
    parts = [torch.ones(_COPY_BYTES // num_threads, dtype=torch.uint8) for _ in range(num_threads)]
    targets = [part.clone() for part in parts]
    with ThreadPoolExecutor(num_threads) as pool:
        took_s = min(_timed(lambda: list(pool.map(torch.Tensor.copy_, targets, parts))) for _ in range(_NUM_COPIES))
    return 2 * _COPY_BYTES / took_s


def disk_bytes_per_s(folder: Path) -> float:
    """Return the bytes per second that a folder's disk writes, fsync included."""
    chunk = os.urandom(_WRITE_BYTES)  # some disks compress
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            for _ in range(_DISK_BYTES // _WRITE_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

        return _DISK_BYTES / _timed(write)


def _rate(transfer: Callable[[int], None]) -> Rate:
    num_bytes = _FIRST_BYTES
    while (alone := _at_once(transfer, num_bytes, 1)).seconds < PROBE_S and num_bytes < MAX_PROBE_BYTES:
        num_bytes *= 2
    best, num = alone, 2
    while num <= MAX_STREAMS:
        several = _at_once(transfer, num_bytes, num)
        if several.bytes_per_s < FASTER * best.bytes_per_s:
            break
        best, num = several, 2 * num
    return best


def _at_once(transfer: Callable[[int], None], num_bytes: int, num: int) -> Rate:
    with ThreadPoolExecutor(num) as pool:
        seconds = _timed(lambda: list(pool.map(transfer, [num_bytes] * num)))
    return Rate(num * num_bytes / seconds, num, seconds)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
