"""The interface of transports.

A transport sends JSON objects (control) and byte payloads with a JSON header (bulk). It does not
interpret rounds or tensors. Only learners open connections, so the syncer's messages wait in an outbox until the
learner polls.

1. Control and bulk use separate connections, so bulk never delays a heartbeat.
2. Each call has a deadline, and each connection uses keepalive. A call either returns or raises `TransportError`
   (`AuthError` for a wrong token or certificate). A transport does not retry.
3. The receiver checks length and checksum of a payload before it uses the payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Polled:
    """The result of a poll.

    Args:
        cursor: cursor for the next poll, which acknowledges these messages.
        messages: messages in the order they were sent; empty if none came in time.
    """

    cursor: int
    messages: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Bulk:
    """A JSON header and raw bytes.

    Args:
        header: a JSON object.
        payload: uint8, one contiguous buffer; may be empty. It is read-only, unless it was downloaded in portions.
            Then only the caller holds it, and a tensor can use its memory without a copy.
    """

    header: Json
    payload: memoryview


class Connection(Protocol):
    """A learner's connection to its syncer."""

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        """Deliver all control messages or none; return the syncer's acknowledgement."""

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        """Wait up to wait_s for messages to this session after cursor."""

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        """Upload a payload; return the syncer's answer."""

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        """Download the payload that the header asks for."""

    def status(self) -> Json:
        """Return the status of the run."""

    def close(self) -> None:
        """Close all connections; idempotent."""


class Handler(Protocol):
    """The syncer's side. Several transport threads call its methods at the same time."""

    def on_send(self, session: str, messages: Sequence[Json]) -> Json: ...

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled: ...

    def on_put(self, bulk: Bulk) -> Json: ...

    def on_get(self, header: Json) -> Bulk: ...

    def on_status(self) -> Json: ...


RESET: Json = {"kind": "Reset"}
