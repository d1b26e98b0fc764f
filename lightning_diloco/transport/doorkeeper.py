"""Ends connections to a server that ask for nothing, or begin and do not go on.

1. A connection is a stranger's until a call came through on it; without the token none can. Strangers have HANDSHAKE_S,
   and there are at most so many of them: one more, and the oldest has to go.
2. An upload that brings nothing for SILENT_S ends, and its connection with it: its memory was set aside (`frames`).
3. pyarrow offers no limits of gRPC's server, so this looks at the sockets of the process: those at the server's port.
   It shuts them down, never closes them: they are gRPC's.

Source: our choice.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from urllib.parse import unquote

LOOK_S = 0.25
HANDSHAKE_S = 20.0
SILENT_S = 60.0
MAX_STRANGERS = 512
_MAX_SCANNED = 1 << 16

Peer = tuple[str, int]


class Doorkeeper:
    """Watches the connections to one port from a thread of its own, from `start` to `stop`.

    Args:
        max_strangers: connections without a call at a time; None: half of the open files that this process may have,
            at most MAX_STRANGERS.
        handshake_s: how long one may be without a call.
        silent_s: how long an upload may bring nothing.
    """

    def __init__(
        self, *, max_strangers: int | None = None, handshake_s: float = HANDSHAKE_S, silent_s: float = SILENT_S
    ) -> None:
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        self._silent_s = silent_s
        self._known: set[Peer] = set()
        self._since_s: dict[Peer, float] = {}  # of strangers, the oldest first
        self._uploads: dict[object, tuple[Peer, float]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, port: int) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._watch, args=(port,), name="flight-doorkeeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def called(self, peer: str) -> None:
        """A call came through on this connection: it is no stranger's.

        Args:
            peer: as gRPC writes it, `ipv4:127.0.0.1:41000` or `ipv6:%5B::1%5D:41000`.
        """
        with self._lock:
            self._known.add(_parsed(peer))

    @contextmanager
    def uploading(self, peer: str) -> Iterator[Callable[[], None]]:
        """Around an upload; what is yielded is to be called whenever some of it came."""
        key, whose = object(), _parsed(peer)

        def came() -> None:
            with self._lock:
                self._uploads[key] = (whose, time.monotonic())

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
        """Look once at all connections, and end those that must."""
        with self._lock:
            known, now_s = self._known.copy(), time.monotonic()
        here = dict(_connections(port))
        with self._lock:
            self._known -= known - here.keys()
            strangers = [peer for peer in here if peer not in self._known]
            silent = [peer for peer, heard_s in self._uploads.values() if now_s - heard_s > self._silent_s]
        before = self._since_s
        self._since_s = {peer: since_s for peer, since_s in before.items() if peer in strangers}
        self._since_s |= {peer: now_s for peer in strangers if peer not in before}
        late = [peer for peer, since_s in self._since_s.items() if now_s - since_s > self._handshake_s]
        too_many = list(self._since_s)[: max(0, len(strangers) - self._allowed())]
        for peer in {*late, *too_many, *silent}:
            _end(here.get(peer), peer)

    def _allowed(self) -> int:
        if self._max_strangers is not None:
            return self._max_strangers
        return min(MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _connections(port: int) -> Iterator[tuple[Peer, int]]:
    """Peer and descriptor of every connection to this port of this process."""
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:  # no descriptor is left to read it with
        numbers = list(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_SCANNED)))
    for number in numbers:
        peer = _peer_of(number, port)
        if peer is not None:
            yield peer, number


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket | None]:
    """The socket of this descriptor, which stays gRPC's; None if it is none."""
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
    """Who is at the other end of this descriptor, if it is a connection to this port."""
    with _borrowed(number) as line:
        if line is None or line.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            return _far_end(line) if line.getsockname()[1] == port else None
        except OSError:  # it listens, or is closed by now
            return None


def _end(number: int | None, peer: Peer) -> None:
    """Shut a connection down, if this descriptor is still that connection."""
    if number is None:
        return
    with _borrowed(number) as line, suppress(OSError):  # it may end by itself
        if line is not None and _far_end(line) == peer:
            line.shutdown(socket.SHUT_RDWR)


def _far_end(line: socket.socket) -> Peer:
    host, port = line.getpeername()[:2]
    return _plain(host), port


@lru_cache(maxsize=4096)  # every call asks
def _parsed(peer: str) -> Peer:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """One spelling for one address: without a zone, and IPv4 as IPv4 where it arrives on an IPv6 socket."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
