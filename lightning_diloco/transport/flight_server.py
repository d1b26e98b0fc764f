"""The Arrow Flight server; see `flight`.

1. The TLS handshake requires a client certificate made from the token (`token_identity`). Without it, the server reads
   no byte of a call. The middleware then compares the token in constant time. `doorkeeper` limits the number and the
   duration of connections that make no call.
2. The server reserves memory for a payload, from a fixed total, before it receives the payload. An upload that does not
   fit waits.
3. A waiting call checks every `_SLICE_S` seconds whether its caller has disconnected or the server stops.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyarrow import flight

from lightning_diloco.errors import CorruptMessageError, DiLoCoError, LocalError, TransportError
from lightning_diloco.transport.address import JoinAddress, join_host_port, split_host_port
from lightning_diloco.transport.base import Handler, Json
from lightning_diloco.transport.doorkeeper import Doorkeeper
from lightning_diloco.transport.failures import OnError, handling, internal_error, log_error, to_json
from lightning_diloco.transport.frames import (
    EMPTY,
    ENVELOPE_KEY,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    SCHEMA,
    Envelope,
    check_schema,
    dumps,
    from_slices,
    loads,
    to_slices,
)
from lightning_diloco.transport.identity import ServerIdentity
from lightning_diloco.transport.token_identity import learners_authority

_SLICE_S = 0.25
_STOP_S = 2.0
_INFLIGHT_PAYLOADS = 16


class FlightServer:
    """Serves a handler until it is stopped; may be started again.

    Args:
        handler: handles the calls, from several threads at once.
        listen: `host:port`; port 0 for any free port, which is then kept.
        token: token that all callers must send.
        tls: certificate of the server; None makes a new one.
        max_payload_bytes: limit of the payload of one call.
        max_inflight_bytes: limit of all uploads being received or handled; None: 16 * max_payload_bytes.
        on_error: called with exceptions of the handler that are not a `DiLoCoError`.
        doorkeeper: returns the `Doorkeeper` that ends connections without calls.

    Raises:
        ConfigError: `listen` is not an address.
    """

    def __init__(
        self,
        handler: Handler,
        listen: str,
        *,
        token: str,
        tls: ServerIdentity | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        max_inflight_bytes: int | None = None,
        on_error: OnError = log_error,
        doorkeeper: Callable[[], Doorkeeper] = Doorkeeper,
    ) -> None:
        self._host, self._port = split_host_port(listen)
        self._handler = handler
        self._token = token
        self._tls = tls or ServerIdentity.create()
        self._doorkeeper = doorkeeper
        self._max_payload_bytes = max_payload_bytes
        self._max_inflight_bytes = max_inflight_bytes or _INFLIGHT_PAYLOADS * max_payload_bytes
        self._on_error = on_error
        self._service: _Service | None = None

    @property
    def address(self) -> str:
        """`host:port` that the server listens on."""
        if not self._port:
            raise LocalError(f"{self._host}: the port is not known yet; call start() first")
        return join_host_port(self._host, self._port)

    def join_address(self, run: str, host: str | None = None) -> JoinAddress:
        """Return the address for learners; `host` replaces the address that the server listens on."""
        port = split_host_port(self.address)[1]
        return JoinAddress(host or self._host, port, run, self._token, self._tls.fingerprint)

    def start(self) -> None:
        """Listen and serve, in threads of gRPC.

        Raises:
            TransportError: the address is in use, or not one of this machine.
        """
        try:
            _check_free(self._host, self._port)
            self._service = _Service(
                f"grpc+tls://{join_host_port(self._host, self._port)}",
                self._handler,
                token=self._token,
                tls=self._tls,
                memory=_Memory(self._max_payload_bytes, self._max_inflight_bytes),
                on_error=self._on_error,
                doorkeeper=self._doorkeeper(),
            )
        except (pa.ArrowException, OSError) as error:
            where, reason = join_host_port(self._host, self._port), getattr(error, "strerror", None) or error
            raise TransportError(
                f"cannot listen on {where} ({reason}); it must be a free port of an address of this machine; choose "
                "another, or port 0 for any"
            ) from error
        self._port = self._service.port
        self._service.doorkeeper.start(self._port)

    def stop(self) -> None:
        """Refuse new calls, end waiting calls, and let running calls finish for up to 2 s; idempotent."""
        service, self._service = self._service, None
        if service is not None:
            service.stopping.set()
            # gRPC waits for all running calls, and a call from a frozen peer lasts until its deadline.
            closing = threading.Thread(target=service.shutdown, name="flight-shutdown", daemon=True)
            closing.start()
            closing.join(_STOP_S)
            service.doorkeeper.stop()

    def __enter__(self) -> FlightServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class _Memory:
    """Memory for payloads (rule 2)."""

    def __init__(self, max_payload_bytes: int, max_inflight_bytes: int) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._free_bytes = max(max_payload_bytes, max_inflight_bytes)
        self._freed = threading.Condition()

    @contextmanager
    def hold(self, num_bytes: int, check: Callable[[], None]) -> Iterator[None]:
        """Reserve memory during the block. While it waits for memory, it calls `check`, which may raise an error."""
        with self._freed:
            while self._free_bytes < num_bytes:
                check()
                self._freed.wait(_SLICE_S)
            self._free_bytes -= num_bytes
        try:
            yield
        finally:
            with self._freed:
                self._free_bytes += num_bytes
                self._freed.notify_all()


class _Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks the token of each call (rule 1)."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[str]]) -> None:
        shown = (headers.get("authorization") or [""])[0]
        if not hmac.compare_digest(shown.encode(errors="replace"), self._expected):
            raise flight.FlightUnauthenticatedError("wrong token")


def _check_free(host: str, port: int) -> None:
    """Raise the system's error if the address cannot be used; gRPC logs its own, and raises one without the reason."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        probe.bind(place)


class _Service(flight.FlightServerBase):  # type: ignore[misc]
    """The gRPC service; its constructor starts to listen."""

    def __init__(
        self,
        location: str,
        handler: Handler,
        *,
        token: str,
        tls: ServerIdentity,
        memory: _Memory,
        on_error: OnError,
        doorkeeper: Doorkeeper,
    ) -> None:
        self.stopping = threading.Event()
        self.doorkeeper = doorkeeper
        self._handler = handler
        self._memory = memory
        self._on_error = on_error
        self._actions = {"send": self._send, "poll": self._poll, "status": self._status}
        super().__init__(
            location,
            middleware={"gate": _Gate(token)},
            tls_certificates=[(tls.certificate, tls.key)],
            verify_client=True,
            root_certificates=learners_authority(token),
        )

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        self.doorkeeper.called(context.peer())
        with self._answered():
            call = self._actions.get(action.type)
            if call is None:
                raise CorruptMessageError(
                    f"action {action.type!r:.40}; must be one of {', '.join(self._actions)}; do both sides run the "
                    "same version?"
                )
            return [call(context, loads(action.body.to_pybytes()))]

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        def check() -> None:
            self._check(context)

        def slices(came: Callable[[], None]) -> Iterator[pa.Buffer | None]:
            for chunk in reader:
                came()
                check()
                yield chunk.app_metadata

        self.doorkeeper.called(context.peer())
        with self._answered():
            envelope = Envelope.decode(descriptor.command or b"", self._memory.max_payload_bytes)
            check_schema(reader.schema)
            with self._memory.hold(envelope.num_bytes, check):
                with self.doorkeeper.uploading(context.peer()) as came:
                    bulk = from_slices(envelope, slices(came))
                with handling(self._on_error):
                    answer = dumps(self._handler.on_put(bulk))
            writer.write(pa.py_buffer(answer))

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        self.doorkeeper.called(context.peer())
        with self._answered():
            header = loads(ticket.ticket, MAX_HEADER_BYTES)
            with handling(self._on_error):
                bulk = self._handler.on_get(header)
                schema = SCHEMA.with_metadata({ENVELOPE_KEY: Envelope.of(bulk).encode()})
            return flight.GeneratorStream(schema, ((EMPTY, part) for part in to_slices(bulk.payload)))

    def _send(self, context: flight.ServerCallContext, body: Json) -> bytes:
        session, messages = _field(body, "session", str), _field(body, "messages", list)
        if not all(isinstance(message, dict) for message in messages):
            raise CorruptMessageError("a message is not a JSON object; all must be; nothing of the call was used")
        with handling(self._on_error):
            return dumps(self._handler.on_send(session, messages))

    def _poll(self, context: flight.ServerCallContext, body: Json) -> bytes:
        session, cursor = _field(body, "session", str), _field(body, "cursor", int)
        ends_s = time.monotonic() + _field(body, "wait_s", float, int)
        while True:
            began_s = time.monotonic()
            slice_s = max(0.0, min(_SLICE_S, ends_s - began_s))
            with handling(self._on_error):
                polled = self._handler.on_poll(session, cursor, slice_s)
                answer = dumps({"cursor": polled.cursor, "messages": list(polled.messages)})
            came_early = time.monotonic() < began_s + slice_s
            if polled.messages or came_early or time.monotonic() >= ends_s:
                return answer
            self._check(context)

    def _status(self, context: flight.ServerCallContext, body: Json) -> bytes:
        with handling(self._on_error):
            return dumps(self._handler.on_status())

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Convert errors to the form of `failures.to_json`, because Arrow would send their tracebacks."""
        try:
            yield
        except flight.FlightError:
            raise
        except pa.ArrowException as error:  # the caller disconnected, or its stream is invalid
            raise flight.FlightServerError(f"the stream broke ({type(error).__name__})") from error
        except Exception as error:
            told = error if isinstance(error, DiLoCoError) else internal_error(error, self._on_error)
            raise flight.FlightServerError(type(told).__name__, extra_info=dumps(to_json(told))) from error

    def _check(self, context: flight.ServerCallContext) -> None:
        """Raise an error if the caller has disconnected or the server stops (rule 3)."""
        if context.is_cancelled():
            raise TransportError("the caller is gone; nothing of the call was used")
        if self.stopping.is_set():
            raise flight.FlightUnavailableError("the syncer is stopping")


def _field(body: Json, name: str, *kinds: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kinds):
        raise CorruptMessageError(
            f"field {name}={value!r:.80}; must be of type {kinds[0].__name__}; do both sides run the same version?"
        )
    return value
