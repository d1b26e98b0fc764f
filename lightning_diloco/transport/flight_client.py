"""The Arrow Flight client; see `flight`.

1. The constructor does not connect. The first call connects, and so does the first call after a failure.
2. Each running call has its own TCP connection. After the call, the client keeps the connection for other calls, for up
   to IDLE_S seconds. Bulk therefore does not delay other calls, and concurrent bulk calls use several connections.
3. If a call finds no server, the client drops its connection. Otherwise gRPC would fail calls for seconds before it
   connects again. If a call misses its deadline, the path may be dead, and the client also drops all idle connections.
   Otherwise gRPC would keep them for a minute.
4. A Flight client is released after its last use and never closed, because closing a client that another thread uses
   crashes the process.
5. `AuthError` (token, certificate) needs action by the user. `TransportError` may be temporary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pyarrow import flight

from lightning_diloco.errors import AuthError, CorruptMessageError, DiLoCoError, TransportError
from lightning_diloco.protocol.syncer.succession import ASK_AFTER_S
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json, Polled
from lightning_diloco.transport.failures import from_json
from lightning_diloco.transport.frames import (
    EMPTY,
    ENVELOPE_KEY,
    MAX_PAYLOAD_BYTES,
    SCHEMA,
    Envelope,
    check_schema,
    dumps,
    from_slices,
    loads,
    to_slices,
)
from lightning_diloco.transport.identity import server_name
from lightning_diloco.transport.introduction import pinned_certificate, refused_token
from lightning_diloco.transport.token_identity import learner_certificate

IDLE_S = 60.0  # routers between the machines may forget a connection that is idle for some minutes
_PIN_CHECK_S = 2.0
_CONNECT_MS = 5000


class FlightConnection:
    """Implements `Connection`; all methods may be called from several threads.

    Args:
        address: address of the run; only the certificate with its fingerprint is trusted.
        control_deadline_s: deadline of send and status, and of poll beyond its wait; at most ASK_AFTER_S if the run has
            a standby, so that a syncer that vanishes without a word is noticed in time.
        keepalive_s: silence after which the connection is probed, and the time limit for the answer.
        max_payload_bytes: limit of the payload of one call.
    """

    def __init__(
        self,
        address: JoinAddress,
        *,
        control_deadline_s: float = 10.0,
        keepalive_s: float = 10.0,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._address = address
        self._shown = learner_certificate(address.token)
        has_standby = address.standby is not None
        self._control_deadline_s = min(control_deadline_s, ASK_AFTER_S) if has_standby else control_deadline_s
        self._keepalive_s = keepalive_s
        self._max_payload_bytes = max_payload_bytes
        self._headers = [(b"authorization", f"Bearer {address.token}".encode())]
        self._idle: list[tuple[flight.FlightClient, float]] = []  # (client, time of its last use), oldest first
        self._pinned: bytes | None = None
        self._lock = threading.Lock()
        self._closed = False

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        return self._act("send", {"session": session, "messages": list(messages)}, self._control_deadline_s)

    def poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        body = {"session": session, "cursor": cursor, "wait_s": wait_s}
        answer = self._act("poll", body, wait_s + self._control_deadline_s)
        return Polled(answer["cursor"], tuple(answer["messages"]))

    def status(self) -> Json:
        return self._act("status", {}, self._control_deadline_s)

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        descriptor = flight.FlightDescriptor.for_command(Envelope.of(bulk).encode())
        with self._call("put", deadline_s) as (client, options):
            writer, answers = client.do_put(descriptor, SCHEMA, options)
            # Only close() raises the syncer's own error. A failed write raises an error about the broken stream.
            with writer:
                for part in to_slices(bulk.payload):
                    writer.write_with_metadata(EMPTY, part)
                writer.done_writing()
                answer = answers.read()
        if answer is None:
            raise CorruptMessageError("the upload got no answer; send it again")
        return loads(answer.to_pybytes())

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        ticket = flight.Ticket(dumps(header))
        with self._call("get", deadline_s) as (client, options):
            reader = client.do_get(ticket, options)
            check_schema(reader.schema)
            metadata = reader.schema.metadata or {}
            envelope = Envelope.decode(metadata.get(ENVELOPE_KEY, b""), self._max_payload_bytes)
            try:
                return from_slices(envelope, (chunk.app_metadata for chunk in reader))
            except CorruptMessageError:
                reader.cancel()
                raise

    def close(self) -> None:
        """Refuse further calls; running calls end at their deadlines."""
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _act(self, name: str, body: Json, deadline_s: float) -> Json:
        action = flight.Action(name, dumps(body))
        with self._call(name, deadline_s) as (client, options):
            results = list(client.do_action(action, options))
        return loads(b"".join(result.body.to_pybytes() for result in results))

    @contextmanager
    def _call(self, name: str, deadline_s: float) -> Iterator[tuple[flight.FlightClient, flight.FlightCallOptions]]:
        began_s, client = time.monotonic(), None
        try:
            client = self._client(deadline_s)
            left_s = max(began_s + deadline_s - time.monotonic(), 0.001)
            yield client, flight.FlightCallOptions(timeout=left_s, headers=self._headers)
            self._keep(client)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            waited_s = time.monotonic() - began_s
            if isinstance(error, flight.FlightTimedOutError):
                with self._lock:
                    self._idle.clear()
            elif client is not None and not isinstance(error, flight.FlightUnavailableError):
                self._keep(client)
            refusal = self._refusal(error, deadline_s - waited_s)
            translated = refusal or self._translated(error, name, waited_s, deadline_s)
            # The syncer's own error is complete; Arrow's traceback above it would only distract.
            raise translated from (error if isinstance(translated, TransportError) else None)

    def _client(self, timeout_s: float) -> flight.FlightClient:
        """Return an idle connection, or a new connection if none is idle."""
        with self._lock:
            fresh_s = time.monotonic() - IDLE_S
            self._idle = [(client, used_s) for client, used_s in self._idle if used_s >= fresh_s]
            client = self._idle.pop()[0] if self._idle else None
        client = client or self._connected(timeout_s)
        if self._closed:
            raise TransportError(f"the connection to {self._address.host_port} is closed; make a new one")
        return client

    def _keep(self, client: flight.FlightClient) -> None:
        """Keep a connection for the next call."""
        with self._lock:
            if not self._closed:
                self._idle.append((client, time.monotonic()))

    def _connected(self, timeout_s: float) -> flight.FlightClient:
        """Return a client with its own TCP connection, which its first call opens."""
        keepalive_ms = round(1000 * self._keepalive_s)
        # max_pings_without_data keeps its default: without a limit, servers drop a connection after 5 s of probes.
        options = [
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),  # time limit of one attempt
            ("grpc.use_local_subchannel_pool", 1),  # otherwise a new client inherits the backoff of the last client
        ]
        self._pinned = self._pinned or pinned_certificate(self._address, self._shown, timeout_s)
        return flight.FlightClient(
            f"grpc+tls://{self._address.host_port}",
            tls_root_certs=self._pinned,
            cert_chain=self._shown[0],
            private_key=self._shown[1],
            override_hostname=server_name(self._pinned) or None,
            generic_options=options,
        )

    def _refusal(self, error: Exception, left_s: float) -> AuthError | None:
        """Return an `AuthError` if gRPC's "unavailable" means a changed or refused certificate."""
        if isinstance(error, flight.FlightUnavailableError) and left_s > 0:
            try:
                pinned_certificate(self._address, self._shown, min(left_s, _PIN_CHECK_S))
            except AuthError as refusal:
                return refusal
            except TransportError:
                pass
        return None

    def _translated(self, error: Exception, name: str, waited_s: float, deadline_s: float) -> DiLoCoError:
        if isinstance(error, flight.FlightServerError) and error.extra_info:
            return from_json(loads(error.extra_info))
        where = self._address.host_port
        if isinstance(error, flight.FlightUnauthenticatedError):
            return refused_token(self._address)
        said = str(error).partition(" gRPC client debug context")[0].removesuffix(".")
        return TransportError(
            f"{name} to {where} failed after {waited_s:.1f} s of {deadline_s:.1f} s ({type(error).__name__}: {said}); "
            "the syncer must run and be reachable; try again"
        )
