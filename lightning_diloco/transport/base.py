"""The seam between what is said and how it travels.

A transport moves JSON objects (control) and byte payloads with a JSON header (bulk). It knows nothing of rounds or
tensors. Learners only dial out, so the syncer's messages wait in an outbox until the learner's poll takes them.

1. Control and bulk use connections of their own: bulk never delays a heartbeat.
2. Every call has a deadline, and every connection keepalive; a call either returns or raises `TransportError`
   (`AuthError` for a token or certificate that is wrong). Nothing is retried here.
3. Payloads are checked for length and checksum before a handler sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Polled:
    """What a poll brought.

    Args:
        cursor: pass this to the next poll; it acknowledges everything up to here.
        messages: in the order they were sent; empty if the wait ended without any.
    """

    cursor: int
    messages: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Bulk:
    """A JSON header and raw bytes.

    Args:
        header: a JSON object.
        payload: uint8, one contiguous read-only buffer; may be empty.
    """

    header: Json
    payload: memoryview


class Connection(Protocol):
    """A learner's way to its syncer."""

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        """Deliver control messages, all or none; returns the syncer's acknowledgement."""

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        """Wait up to wait_s for messages to this session after cursor."""

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        """Upload; returns the syncer's answer once it has the whole payload."""

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        """Download what the header asks for."""

    def status(self) -> Json:
        """The syncer's public state, for people."""

    def close(self) -> None:
        """Let go of all connections; idempotent."""


class Handler(Protocol):
    """The syncer's side; called from transport threads, several at once."""

    def on_send(self, session: str, messages: Sequence[Json]) -> Json: ...

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled: ...

    def on_put(self, bulk: Bulk) -> Json: ...

    def on_get(self, header: Json) -> Bulk: ...

    def on_status(self) -> Json: ...


RESET: Json = {"kind": "Reset"}
