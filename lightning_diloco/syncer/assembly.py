"""Assemble contributions that arrive in parts, one from each rank of a learner, or in portions of parts.

1. All parts belong to one session and one contribution. The state machine gets an event when the last part has arrived.
   Only the sender of a part gets an error in it.
2. One contribution per session and fragment is assembled at a time. A higher seq replaces a lower seq. A repeated part
   changes nothing. The memory of the whole contribution is allocated with its first part.
3. A long part arrives in portions, in any order (`transport/portions.py`). The answer lists the missing bytes.
4. The parts of a contribution that cannot be merged any more are dropped.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.parts import part_range
from lightning_diloco.core.quantize import integers_nbytes, wire_nbytes
from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import messages
from lightning_diloco.protocol.intervals import Ranges
from lightning_diloco.transport.base import Bulk, Json
from lightning_diloco.transport.portions import Received, place

MAX_PARTS = 1 << 16


class Admission(Protocol):
    """Decides which payloads are kept: the syncer's state machine, or a shard's knowledge of it."""

    @property
    def config(self) -> RunConfig:
        """Options of the run."""

    def may_merge(self, session: str, ready: messages.Ready) -> bool:
        """Return whether a payload could still be merged, so that it is worth keeping. Any thread."""


@dataclass(slots=True)
class _Assembly:
    """One incomplete contribution."""

    ready: messages.Ready
    num_parts: int
    whole: Tensor
    have: dict[int, Received] = field(default_factory=dict)  # by part
    is_complete: bool = False
    filling: threading.Lock = field(default_factory=threading.Lock)


class Assemblies:
    """All incomplete contributions; safe to use from several threads."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Assembly] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all incomplete contributions."""
        with self._lock:
            return sum(each.whole.nbytes for each in self._open.values())

    def add(
        self, session: str, ready: messages.Ready, bulk: Bulk, *, numel: int, config: RunConfig
    ) -> tuple[Ranges, Tensor | None]:
        """Keep a part, or a portion of it.

        Args:
            session: the sender.
            ready: description of the contribution.
            bulk: header {"part": k, "num_parts": n} and bytes; without these fields it is the only part.
            numel: number of values in the fragment.
            config: options of the run.

        Returns:
            The missing bytes of this part; and the whole contribution if this part completed it, else None.

        Raises:
            CorruptMessageError: the bytes are not a part of this contribution.
        """
        (k, n), (at, of) = _numbers(bulk.header), place(bulk)
        start, stop = part_range(k, n, numel, config.block_size)
        if of != (wanted := wire_nbytes(stop - start, config.wire, config.block_size)):
            raise CorruptMessageError(
                f"{of} bytes as part {k} of {n} of fragment {ready.fragment}; it must have {wanted} in "
                f"{config.wire}; nothing of it was used; do all ranks run the same version?"
            )
        with self._lock:
            found = self._open.get((session, ready.fragment))
            if found is None or ready.seq > found.ready.seq:
                whole = torch.empty(wire_nbytes(numel, config.wire, config.block_size), dtype=torch.uint8)
                found = self._open[session, ready.fragment] = _Assembly(ready, n, whole)
            if (found.ready, found.num_parts) != (ready, n):
                raise CorruptMessageError(
                    f"part {k} of {n} of {ready}; expected {found.num_parts} parts of {found.ready}; nothing of it "
                    "was used; all ranks must send parts of the newest contribution"
                )
        with found.filling:
            received = found.have.setdefault(k, Received(of))
            if not found.is_complete:
                _put(found.whole, bulk.payload, at, part=(start, stop), numel=numel, config=config)
                received.add(at, bulk.payload.nbytes)
                found.is_complete = len(found.have) == n and not any(part.missing for part in found.have.values())
                if found.is_complete:
                    self.drop(session, ready.fragment, ready.seq)
                    return [], found.whole
            return received.missing, None

    def drop(self, session: str, fragment: int, seq: int) -> None:
        """Drop the parts of contributions up to this seq."""
        with self._lock:
            found = self._open.get((session, fragment))
            if found is not None and found.ready.seq <= seq:
                del self._open[session, fragment]

    def clear(self) -> None:
        """Drop all parts."""
        with self._lock:
            self._open = {}

    def prune(self, state: Admission) -> None:
        """Drop contributions that cannot be merged any more."""
        if self._open:
            with self._lock:
                kept = {key: each for key, each in self._open.items() if state.may_merge(key[0], each.ready)}
                self._open = kept


def _put(whole: Tensor, payload: memoryview, at: int, *, part: tuple[int, int], numel: int, config: RunConfig) -> None:
    """Copy bytes of a part, starting at its byte `at`, to the integers and scales of the whole."""
    start, stop = part
    first, last, end = (integers_nbytes(value, config.wire, config.block_size) for value in (start, stop, numel))
    num_integers = min(max(last - first - at, 0), payload.nbytes)
    into = whole.numpy()
    into[first + at : first + at + num_integers] = payload[:num_integers]
    scales = payload[num_integers:]
    if scales.nbytes:
        begin = end + 2 * (start // config.block_size) + at + num_integers - (last - first)
        into[begin : begin + scales.nbytes] = scales


def _numbers(header: Json) -> tuple[int, int]:
    k, n = header.get("part", 0), header.get("num_parts", 1)
    if type(k) is not int or type(n) is not int or not 0 <= k < n <= MAX_PARTS:
        raise CorruptMessageError(
            f"part={k!r:.40} of num_parts={n!r:.40}; must be integers with 0 <= part < num_parts <= {MAX_PARTS}; "
            "nothing of it was used; do all ranks run the same version?"
        )
    return k, n
