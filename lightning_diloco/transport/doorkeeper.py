"""End connections to a server that make no call, and uploads that stop.

1. A connection is unknown until a call arrives on it. A call needs the token. The doorkeeper ends an unknown connection
   after HANDSHAKE_S seconds. At most MAX_STRANGERS unknown connections may be open. If there are more, the doorkeeper
   ends the oldest.
2. If an upload receives no data for SILENT_S seconds, the doorkeeper ends its connection, because the server has
   reserved memory for it (rule 2 of `flight_server`). On a slow link, a slice of an upload may take longer than that.
   On Linux, the bytes of the connection therefore count, if they are more than pings have. Elsewhere, only whole slices
   do.
3. The doorkeeper calls `many_ended` when MANY connections have ended. The syncer then returns their memory to the
   system. Otherwise the process would stay large after many unknown connections.
4. pyarrow does not offer the connection limits of gRPC's server. The doorkeeper therefore inspects the sockets of the
   process at the server's port. It shuts sockets down but never closes them, because gRPC owns them.

Source: our choice.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from urllib.parse import unquote

LOOK_S = 0.25
HANDSHAKE_S = 20.0
SILENT_S = 60.0
MAX_STRANGERS = 512
MANY = 32
_MAX_SCANNED = 1 << 16
_PINGS_BYTES = 16 << 10  # more than the pings of SILENT_S
_BYTES_RECEIVED = slice(128, 136)  # tcpi_bytes_received of Linux's struct tcp_info

Peer = tuple[str, int]


class Doorkeeper:
    """Watches the connections to one port in its own thread.

    Args:
        max_strangers: limit of connections without a call; None: half of the limit of open files, at most
            MAX_STRANGERS.
        handshake_s: seconds that a connection may stay without a call.
        silent_s: seconds that an upload may stay without data, see rule 2.
        many_ended: called in the doorkeeper's thread when MANY connections have ended.
    """

    def __init__(
        self,
        *,
        max_strangers: int | None = None,
        handshake_s: float = HANDSHAKE_S,
        silent_s: float = SILENT_S,
        many_ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        self._silent_s = silent_s
        self._many_ended = many_ended
        self._known: set[Peer] = set()
        self._since_s: dict[Peer, float] = {}  # first time each unknown connection was seen, oldest first
        self._num_open = 0  # maximum since the last call of `many_ended`
        self._uploads: dict[object, tuple[Peer, float, int | None]] = {}  # last data, and bytes received by then
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, port: int) -> None:
        """Start the thread that watches the connections to `port`."""
        self._thread = threading.Thread(target=self._watch, args=(port,), name="flight-doorkeeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def called(self, peer: str) -> None:
        """Mark a connection as known, because a call arrived on it.

        Args:
            peer: peer as written by gRPC, `ipv4:127.0.0.1:41000` or `ipv6:%5B::1%5D:41000`.
        """
        with self._lock:
            self._known.add(_parsed(peer))

    @contextmanager
    def uploading(self, peer: str) -> Iterator[Callable[[], None]]:
        """Watch an upload during the block; call the yielded function whenever data arrives."""
        key, whose = object(), _parsed(peer)

        def came() -> None:
            with self._lock:
                self._uploads[key] = (whose, time.monotonic(), None)

        came()
        try:
            yield came
        finally:
            with self._lock:
                del self._uploads[key]

    def _watch(self, port: int) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look(port)

    def look(self, port: int) -> None:
        """Check all connections once, and end those that break a limit."""
        with self._lock:
            known, now_s = self._known.copy(), time.monotonic()
        here = dict(_connections(port))
        with self._lock:
            self._known -= known - here.keys()
            strangers = [peer for peer in here if peer not in self._known]
            self._uploads = {key: _looked_at(*each, here, now_s) for key, each in self._uploads.items()}
            silent = [peer for peer, heard_s, _ in self._uploads.values() if now_s - heard_s > self._silent_s]
        before = self._since_s
        self._since_s = {peer: since_s for peer, since_s in before.items() if peer in strangers}
        self._since_s |= {peer: now_s for peer in strangers if peer not in before}
        late = [peer for peer, since_s in self._since_s.items() if now_s - since_s > self._handshake_s]
        too_many = list(self._since_s)[: max(0, len(strangers) - self._allowed())]
        for peer in {*late, *too_many, *silent}:
            _end(here.get(peer), peer)
        self._num_open = max(self._num_open, len(here))
        if self._num_open - len(here) >= MANY:
            self._num_open = len(here)
            self._many_ended()

    def _allowed(self) -> int:
        if self._max_strangers is not None:
            return self._max_strangers
        return min(MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _connections(port: int) -> Iterator[tuple[Peer, int]]:
    """Yield peer and descriptor of each connection to a port of this process."""
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:  # no free descriptor to open /dev/fd
        numbers = list(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_SCANNED)))
    for number in numbers:
        peer = _peer_of(number, port)
        if peer is not None:
            yield peer, number


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket | None]:
    """Yield the socket of a descriptor without owning it; None if it is not a socket."""
    try:
        line = socket.socket(fileno=number)
    except OSError:
        yield None
        return
    try:
        yield line
    finally:
        line.detach()


def _peer_of(number: int, port: int) -> Peer | None:
    """Return the peer of a descriptor, if it is a connection to this port."""
    with _borrowed(number) as line:
        if line is None or line.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            return _far_end(line) if line.getsockname()[1] == port else None
        except OSError:  # a listening socket, or closed in the meantime
            return None


def _looked_at(
    peer: Peer, heard_s: float, counted: int | None, here: Mapping[Peer, int], now_s: float
) -> tuple[Peer, float, int | None]:
    """Return an upload with the time of its last data, according to the bytes of its connection."""
    received = _num_received(here.get(peer))
    if counted is None:
        return peer, heard_s, received
    return (peer, now_s, received) if received > counted + _PINGS_BYTES else (peer, heard_s, counted)


def _num_received(number: int | None) -> int:
    """Return the bytes that a connection has received; 0 if the system does not report them."""
    if number is None or sys.platform != "linux":
        return 0
    with _borrowed(number) as line, suppress(OSError):
        if line is not None:
            info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
            return int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder)
    return 0


def _end(number: int | None, peer: Peer) -> None:
    """Shut down a connection, if the descriptor still belongs to it."""
    if number is None:
        return
    with _borrowed(number) as line, suppress(OSError):  # it may have ended by itself
        if line is not None and _far_end(line) == peer:
            line.shutdown(socket.SHUT_RDWR)


def _far_end(line: socket.socket) -> Peer:
    host, port = line.getpeername()[:2]
    return _plain(host), port


@lru_cache(maxsize=4096)  # needed for each call
def _parsed(peer: str) -> Peer:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """Normalize an address: without a zone, and IPv4 as IPv4 also on an IPv6 socket."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
