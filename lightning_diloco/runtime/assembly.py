"""Contributions that come in parts, one from each rank of a learner, until they are whole.

1. All parts are of the same session and the same contribution; the protocol hears of it when the last one is there.
   Ranks have no incarnation, no fate and no refusal of their own: what is wrong with a part is told to its sender only.
2. One contribution per session and fragment is put together at a time: a higher seq replaces a lower one, and a part
   that comes twice changes nothing. So all parts take no more memory than whole contributions would; only while one is
   joined it exists twice.
3. Parts are dropped with the contribution: decided, of a process that was fenced off or has left, of a generation that
   is over.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.parts import joined, part_range
from lightning_diloco.core.quantize import wire_nbytes
from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import SyncerState, messages
from lightning_diloco.transport.base import Json

MAX_PARTS = 1 << 16


@dataclass(slots=True)
class _Assembly:
    """Parts of one contribution."""

    ready: messages.Ready
    num_parts: int
    parts: dict[int, Tensor] = field(default_factory=dict)


class Assemblies:
    """What is here of contributions that are not whole."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Assembly] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory of all parts that wait for others."""
        with self._lock:
            return sum(part.nbytes for each in self._open.values() for part in each.parts.values())

    def add(
        self, session: str, ready: messages.Ready, header: Json, payload: Tensor, *, numel: int, config: RunConfig
    ) -> Tensor | None:
        """Keep a part.

        Args:
            session: whose it is.
            ready: which contribution it belongs to.
            header: {"part": k, "num_parts": n}.
            payload: the part.
            numel: values of the fragment.
            config: of the run.

        Returns:
            The whole contribution, if this was the last part.

        Raises:
            CorruptMessageError: it is no part of this contribution.
        """
        k, n = _numbers(header)
        start, stop = part_range(k, n, numel, config.block_size)
        if payload.numel() != (wanted := wire_nbytes(stop - start, config.wire, config.block_size)):
            raise CorruptMessageError(
                f"{payload.numel()} bytes as part {k} of {n} of fragment {ready.fragment}; it takes {wanted} as "
                f"{config.wire}; nothing of it was used; do all ranks run the same version?"
            )
        with self._lock:
            found = self._open.setdefault((session, ready.fragment), _Assembly(ready, n))
            if ready.seq > found.ready.seq:
                found = self._open[session, ready.fragment] = _Assembly(ready, n)
            if (found.ready, found.num_parts) != (ready, n):
                raise CorruptMessageError(
                    f"part {k} of {n} of {ready}; parts of {found.ready} in {found.num_parts} are awaited; nothing of "
                    "it was used; all ranks must send parts of the newest contribution"
                )
            found.parts.setdefault(k, payload)
            if len(found.parts) < n:
                return None
            del self._open[session, ready.fragment]
        parts = [found.parts[k] for k in range(n)]
        return joined(parts, numel=numel, wire=config.wire, block_size=config.block_size)

    def drop(self, session: str, fragment: int, seq: int) -> None:
        """Parts up to this contribution are not needed any more."""
        with self._lock:
            found = self._open.get((session, fragment))
            if found is not None and found.ready.seq <= seq:
                del self._open[session, fragment]

    def prune(self, state: SyncerState) -> None:
        """Drop what cannot be merged any more, whoever decided so."""
        if self._open:
            with self._lock:
                kept = {key: each for key, each in self._open.items() if state.may_merge(key[0], each.ready)}
                self._open = kept


def _numbers(header: Json) -> tuple[int, int]:
    k, n = header.get("part"), header.get("num_parts")
    if type(k) is not int or type(n) is not int or not 0 <= k < n <= MAX_PARTS:
        raise CorruptMessageError(
            f"part={k!r:.40} of num_parts={n!r:.40}; must be integers with 0 <= part < num_parts <= {MAX_PARTS}; "
            "nothing of it was used; do all ranks run the same version?"
        )
    return k, n
