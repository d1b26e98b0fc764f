"""A transport within one process.

1. The transport converts messages and headers to JSON and back, and copies payloads, as a network transport does.
2. The transport calls `fault` with the name of each call before and after the handler runs (for example "put" and
   "put answer"). If `fault` raises an error before the handler runs, the request is lost. If it raises an error
   afterwards, the answer is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_diloco.errors import DiLoCoError, TransportError
from lightning_diloco.transport.base import Bulk, Handler, Json, Polled
from lightning_diloco.transport.failures import OnError, from_json, handling, log_error, to_json
from lightning_diloco.transport.frames import dumps, loads

Fault = Callable[[str], None]
_T = TypeVar("_T")


class MemoryTransport:
    """Connects learners to a handler in the same process.

    Args:
        handler: the syncer's side.
        fault: may raise `TransportError`; see rule 2 of the module.
        on_error: called with exceptions of the handler that are not a `DiLoCoError`.
    """

    def __init__(self, handler: Handler, *, fault: Fault | None = None, on_error: OnError = log_error) -> None:
        self.handler = handler
        self.fault: Fault = fault or (lambda _: None)
        self.on_error = on_error

    def connect(self) -> MemoryConnection:
        """Return a new connection."""
        return MemoryConnection(self)


class MemoryConnection:
    """Implements `Connection`."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._closed = False

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        sent = tuple(_copied(message) for message in messages)
        return self._call("send", lambda handler: _copied(handler.on_send(session, sent)))

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        def run(handler: Handler) -> Polled:
            polled = handler.on_poll(session, cursor, wait_s)
            return Polled(polled.cursor, tuple(_copied(message) for message in polled.messages))

        return self._call("poll", run)

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        sent = _copied_bulk(bulk)
        return self._call("put", lambda handler: _copied(handler.on_put(sent)))

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        asked = _copied(header)
        return self._call("get", lambda handler: _copied_bulk(handler.on_get(asked)))

    def status(self) -> Json:
        return self._call("status", lambda handler: _copied(handler.on_status()))

    def close(self) -> None:
        self._closed = True

    def _call(self, name: str, run: Callable[[Handler], _T]) -> _T:
        if self._closed:
            raise TransportError(f"{name} on a closed connection; connect again")
        transport = self._transport
        transport.fault(name)
        try:
            with handling(transport.on_error):
                result = run(transport.handler)
        except DiLoCoError as error:
            raise from_json(to_json(error)) from error
        transport.fault(f"{name} answer")
        return result


def _copied(value: Json) -> Json:
    return loads(dumps(value))


def _copied_bulk(bulk: Bulk) -> Bulk:
    return Bulk(_copied(bulk.header), memoryview(bytes(bulk.payload)))
