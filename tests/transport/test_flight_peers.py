"""A peer that is gone or frozen: calls end in time, and continue when it is back."""

from __future__ import annotations

import time

import pytest

from lightning_diloco.errors import TransportError
from lightning_diloco.transport.faults import FaultProxy
from tests.transport.conftest import MIB, bulk, every_call


def test_a_stopped_server_fails_calls_quickly_and_the_same_connection_works_at_once_after_restart(
    served, dial, handler, pool
):
    connection = dial(served.join_address("run"))
    connection.put(bulk(MIB), deadline_s=5)
    handler.entered.clear()
    waiting = pool.submit(connection.poll, "s", 0, 30.0)
    assert handler.entered.wait(5)
    began_s = time.monotonic()
    served.stop()
    with pytest.raises(TransportError):
        waiting.result(5)
    for call in [*every_call(connection)] * 4:
        with pytest.raises(TransportError):
            call()
    assert time.monotonic() - began_s < 4.0
    served.start()
    assert connection.status() == {"status": "running"}
    assert connection.poll("s", 0, 0.0).messages == ()
    assert connection.put(bulk(MIB), deadline_s=5) == {"got": MIB}


def test_a_cut_connection_ends_a_waiting_poll_at_once(serve, dial, handler, pool):
    server = serve()
    with FaultProxy(server.address) as proxy:
        connection = dial(server.join_address("run"), through=proxy)
        waiting = pool.submit(connection.poll, "s", 0, 30.0)
        assert handler.entered.wait(5)
        proxy.cut()
        with pytest.raises(TransportError):
            waiting.result(2)


@pytest.mark.seconds
def test_a_frozen_peer_ends_every_call_within_its_deadline(served, dial, pool, eventually):
    with FaultProxy(served.address) as proxy:
        connection = dial(served.join_address("run"), through=proxy, keepalive_s=0.2, control_deadline_s=0.8)
        connection.put(bulk(16 * MIB), deadline_s=5)
        connection.poll("s", 0, 0.0)
        connection.status()
        proxy.freeze()
        began_s = time.monotonic()
        frozen = [
            pool.submit(connection.put, bulk(16 * MIB), deadline_s=0.8),
            pool.submit(connection.get, {}, deadline_s=0.8),
            pool.submit(connection.send, "s", [{}]),
            pool.submit(connection.poll, "s", 0, 0.0),
        ]
        for call in frozen:
            with pytest.raises(TransportError):
                call.result(5)
        assert time.monotonic() - began_s < 2.0
        proxy.heal()
        assert eventually(connection.status) == {"status": "running"}


@pytest.mark.seconds
def test_after_a_missed_deadline_a_new_connection_is_made(served, dial, handler):
    with FaultProxy(served.address) as proxy:
        connection = dial(served.join_address("run"), through=proxy, control_deadline_s=0.5)
        connection.status()
        proxy.hold()  # open connections lose all data, and new ones work
        with pytest.raises(TransportError, match=r"of 0\.5 s"):
            connection.status()
        assert connection.status() == {"status": "running"}


@pytest.mark.seconds
def test_an_upload_that_freezes_releases_its_memory_at_its_deadline(serve, dial, pool, eventually):
    server = serve(max_payload_bytes=16 * MIB, max_inflight_bytes=16 * MIB)
    with FaultProxy(server.address, rate_bps=8 * 32e6) as proxy:
        stuck = dial(server.join_address("run"), through=proxy, keepalive_s=0.2)
        upload = pool.submit(stuck.put, bulk(16 * MIB), deadline_s=0.6)

        def half_way() -> None:
            assert proxy.bytes_up > MIB

        eventually(half_way)
        proxy.freeze()
        assert dial(server.join_address("run")).put(bulk(16 * MIB), deadline_s=5) == {"got": 16 * MIB}
        with pytest.raises(TransportError):
            upload.result(5)


@pytest.mark.slow
def test_a_long_poll_outlasts_the_keepalive_probes(serve, dial):
    """A server drops a connection after about 5 s of probes without data, so probes must be few."""
    connection = dial(serve().join_address("run"), keepalive_s=0.5)
    assert connection.poll("s", 0, 8.0).messages == ()


def test_an_unused_port_is_a_transport_error_with_address_and_advice(serve, dial, identity):
    server = serve(tls=identity)
    address = server.join_address("run")
    server.stop()
    with pytest.raises(TransportError, match=f"{address.host_port}.*must.*check"):
        dial(address).status()
