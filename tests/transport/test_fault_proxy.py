"""The fault proxy works as documented, with plain sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_diloco.errors import LocalError
from lightning_diloco.transport.address import split_host_port
from lightning_diloco.transport.faults import FaultProxy


@pytest.fixture
def echo() -> Iterator[str]:
    """Return the address of a server that returns received bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(peer: socket.socket) -> None:
        with peer:
            try:
                while data := peer.recv(1 << 16):
                    peer.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(peer,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def proxy(echo: str) -> Iterator[FaultProxy]:
    with FaultProxy(echo) as running:
        yield running


def dial(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(split_host_port(proxy.address), timeout=5)


def exchange(peer: socket.socket, data: bytes) -> bytes:
    sending = threading.Thread(target=peer.sendall, args=(data,), daemon=True)
    sending.start()
    back = receive(peer, len(data))
    sending.join()
    return back


def receive(peer: socket.socket, num_bytes: int) -> bytes:
    back = b""
    while len(back) < num_bytes and (part := peer.recv(num_bytes - len(back))):
        back += part
    return back


def test_bytes_pass_unchanged_and_are_counted_each_way(proxy):
    data = bytes(range(256)) * 4096
    with dial(proxy) as peer:
        assert exchange(peer, data) == data
    assert (proxy.bytes_up, proxy.bytes_down, proxy.num_connections) == (len(data), len(data), 1)


def test_a_half_closed_stream_passes_on_its_end(proxy):
    with dial(proxy) as peer:
        peer.sendall(b"last")
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(10) == b"last"
        assert peer.recv(10) == b""


def test_delay_applies_once_per_direction_and_not_per_chunk(proxy):
    proxy.delay_s = 0.1
    with dial(proxy) as peer:
        began_s = time.monotonic()
        exchange(peer, bytes(1 << 20))
    assert 0.2 <= time.monotonic() - began_s < 1.0


def test_rate_limits_all_connections_together(proxy):
    proxy.rate_bps = 8 * 2e6
    with dial(proxy) as one, dial(proxy) as two:
        began_s = time.monotonic()
        one.sendall(bytes(200_000))
        exchange(two, bytes(200_000))
        receive(one, 200_000)
    assert time.monotonic() - began_s >= 0.15


def test_cut_resets_and_refuses_until_healed(proxy):
    with dial(proxy) as peer:
        assert exchange(peer, b"hi") == b"hi"
        proxy.cut()
        with pytest.raises(ConnectionError):
            peer.recv(1)
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    proxy.heal()
    with dial(proxy) as peer:
        assert exchange(peer, b"back") == b"back"


def test_freeze_accepts_and_holds_data_until_heal(proxy):
    with dial(proxy) as old:
        assert exchange(old, b"hi") == b"hi"
        proxy.freeze()
        with dial(proxy) as new:
            for peer in (old, new):
                peer.sendall(b"later")
                peer.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    peer.recv(1)
                peer.settimeout(5)
            proxy.heal()
            assert [receive(peer, 5) for peer in (old, new)] == [b"later", b"later"]


def test_hold_freezes_open_connections_and_new_ones_overtake_them(proxy):
    with dial(proxy) as old:
        assert exchange(old, b"hi") == b"hi"
        proxy.hold()
        old.sendall(b"first")
        with dial(proxy) as new:
            assert exchange(new, b"second") == b"second"
            old.settimeout(0.05)
            with pytest.raises(TimeoutError):
                old.recv(1)
            old.settimeout(5)
            proxy.heal()
            assert receive(old, 5) == b"first"
            assert exchange(new, b"third") == b"third"


def test_resets_happen_with_the_probability_given(proxy):
    proxy.reset_probability = 1.0
    with dial(proxy) as peer, pytest.raises(ConnectionError):
        exchange(peer, b"hi")
    proxy.reset_probability = 0.0
    with dial(proxy) as peer:
        assert exchange(peer, b"hi") == b"hi"


def test_stop_ends_everything_and_may_be_repeated(echo):
    proxy = FaultProxy(echo).start()
    with dial(proxy) as peer:
        assert exchange(peer, b"hi") == b"hi"
        proxy.stop()
        proxy.stop()
        with pytest.raises(ConnectionError):
            peer.recv(1)
    with pytest.raises(LocalError, match="does not run"):
        proxy.freeze()
