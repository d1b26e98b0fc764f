"""What only a network can do wrong: strangers, dead peers, frozen peers, damaged bytes."""

from __future__ import annotations

import datetime
import logging
import time
from dataclasses import replace

import pyarrow as pa
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pyarrow import flight

from lightning_diloco.errors import AuthError, ConfigError, CorruptMessageError, LocalError, TransportError
from lightning_diloco.transport import flight_client, frames
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk
from lightning_diloco.transport.faults import FaultProxy
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from lightning_diloco.transport.identity import ClientIdentity, ServerIdentity

MIB = 1 << 20


def bulk(num_bytes: int = 0) -> Bulk:
    return Bulk({}, memoryview(bytes(num_bytes)))


@pytest.fixture(params=["plain", "tls"])
def served(request, serve, identity):
    return serve(tls=identity if request.param == "tls" else None)


def every_call(connection):
    yield lambda: connection.send("s", [{}])
    yield lambda: connection.poll("s", 0, 0.0)
    yield connection.status
    yield lambda: connection.put(bulk(MIB), deadline_s=5)
    yield lambda: connection.get({}, deadline_s=5)


# --- damaged bytes


def test_a_damaged_upload_is_refused_before_the_handler(serve, dial, handler, monkeypatch):
    connection = dial(serve().join_address("run"))
    honest = frames.Envelope.of
    monkeypatch.setattr(frames.Envelope, "of", lambda b: replace(honest(b), crc32=honest(b).crc32 ^ 1))
    with pytest.raises(CorruptMessageError, match="checksum"):
        connection.put(bulk(5 * MIB), deadline_s=5)
    assert not handler.entered.is_set()


def test_a_damaged_download_is_refused(serve, dial, monkeypatch):
    connection = dial(serve().join_address("run"))
    connection.put(bulk(5 * MIB), deadline_s=5)
    honest = frames.Envelope.of
    monkeypatch.setattr(frames.Envelope, "of", lambda b: replace(honest(b), crc32=honest(b).crc32 ^ 1))
    with pytest.raises(CorruptMessageError, match="checksum"):
        connection.get({}, deadline_s=5)


def test_a_truncated_upload_is_refused(serve, dial, handler, monkeypatch):
    monkeypatch.setattr(flight_client, "to_batches", lambda payload: list(frames.to_batches(payload))[:-1])
    with pytest.raises(CorruptMessageError, match="only"):
        dial(serve().join_address("run")).put(bulk(5 * MIB), deadline_s=5)
    assert not handler.entered.is_set()


def test_an_oversized_upload_is_refused_before_memory_is_taken(serve, dial, handler, monkeypatch):
    connection = dial(serve(max_payload_bytes=MIB).join_address("run"))
    monkeypatch.setattr(pa, "allocate_buffer", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(CorruptMessageError, match=f"{20 * MIB} bytes was declared; at most {MIB} are taken"):
        connection.put(bulk(20 * MIB), deadline_s=5)
    assert not handler.entered.is_set()


def test_an_oversized_download_is_refused(serve, dial):
    address = serve().join_address("run")
    dial(address).put(bulk(2 * MIB), deadline_s=5)
    with pytest.raises(CorruptMessageError, match="at most"):
        dial(address, max_payload_bytes=MIB).get({}, deadline_s=5)


def test_uploads_beyond_the_memory_for_all_wait_for_each_other(serve, dial, handler, pool):
    connection = dial(serve(max_payload_bytes=4 * MIB, max_inflight_bytes=4 * MIB).join_address("run"))
    held, most = [], []
    on_put = handler.on_put

    def watched(b):
        held.append(1)
        most.append(len(held))
        answer = on_put(b)
        held.pop()
        return answer

    handler.on_put = watched
    answers = list(pool.map(lambda _: connection.put(bulk(3 * MIB), deadline_s=10), range(6)))
    assert answers == [{"got": 3 * MIB}] * 6
    assert set(most) == {1}


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"session":1,"messages":[]}', b'{"session":"s","messages":[1]}'])
def test_a_malformed_message_is_refused_before_the_handler(serve, handler, body):
    server = serve()
    with flight.FlightClient(f"grpc://{server.address}") as client:
        options = flight.FlightCallOptions(
            headers=[(b"authorization", f"Bearer {server.join_address('r').token}".encode())]
        )
        with pytest.raises(flight.FlightServerError, match="CorruptMessageError"):
            list(client.do_action(flight.Action("send", body), options))
    assert not handler.entered.is_set()


# --- strangers


def test_a_wrong_token_is_an_auth_error_on_every_call(served, dial, handler):
    address = served.join_address("run")
    for call in every_call(dial(replace(address, token="stolen-guess"))):
        with pytest.raises(AuthError, match="refused the token"):
            call()
    assert not handler.entered.is_set()


def test_a_call_without_any_token_is_refused(serve, handler):
    with (
        flight.FlightClient(f"grpc://{serve().address}") as client,
        pytest.raises(flight.FlightUnauthenticatedError),
    ):
        list(client.do_action(flight.Action("status", b"{}")))
    assert not handler.entered.is_set()


def test_another_certificate_than_the_pinned_one_is_an_auth_error_with_both_hashes(serve, dial, identity, handler):
    address = serve(tls=identity).join_address("run")
    for call in every_call(dial(replace(address, fingerprint="0" * 64))):
        with pytest.raises(AuthError) as caught:
            call()
        assert identity.fingerprint in str(caught.value)
        assert "0" * 64 in str(caught.value)
    assert not handler.entered.is_set()


def test_a_certificate_that_changes_under_an_open_connection_is_an_auth_error(handler, dial, identity, eventually):
    first = FlightServer(handler, "127.0.0.1:0", token="tok", tls=identity)
    first.start()
    connection = dial(first.join_address("run"))
    connection.status()
    first.stop()
    handler.entered.clear()
    with FlightServer(handler, first.address, token="tok", tls=ServerIdentity.create()):

        def refused() -> None:
            with pytest.raises(AuthError, match=identity.fingerprint):
                connection.status()

        eventually(refused)
    assert not handler.entered.is_set()


def test_a_server_without_tls_never_sees_the_token_of_a_pinned_address(serve, dial, handler):
    address = replace(serve().join_address("run"), fingerprint="0" * 64)
    with pytest.raises(TransportError, match="no certificate"):
        dial(address).status()
    assert not handler.entered.is_set()


def test_the_token_is_in_no_error_repr_or_log(serve, dial, handler, caplog, identity):
    caplog.set_level(logging.DEBUG)
    server = serve(tls=identity)
    address = server.join_address("run")
    texts = [repr(server), repr(address), repr(dial(address))]
    handler.error = ValueError("boom")
    wrong = dial(replace(address, token="stolen-guess"))
    calls = [*every_call(dial(address)), *every_call(wrong)]
    for call in calls:
        with pytest.raises((TransportError, AuthError)) as caught:
            call()
        texts.append(repr(caught.value))
    assert "internal error at the syncer" in caplog.text
    assert not [text for text in [*texts, caplog.text] if address.token in text or "stolen-guess" in text]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "syncer.example.org:0"])
def test_listening_off_loopback_without_tls_is_refused_at_construction(handler, listen):
    with pytest.raises(ConfigError, match="TLS"):
        FlightServer(handler, listen, token="tok")


def test_dialling_off_loopback_without_tls_is_refused_at_construction():
    with pytest.raises(ConfigError, match="TLS"):
        FlightConnection(JoinAddress("192.0.2.1", 7, "run", "tok"))


def test_all_interfaces_with_tls_are_served(handler, dial, identity):
    with FlightServer(handler, "0.0.0.0:0", token="tok", tls=identity) as server:
        assert dial(server.join_address("run", host="localhost")).status() == {"status": "running"}


def test_ipv6_is_served(handler, dial, identity):
    server = FlightServer(handler, "[::1]:0", token="tok", tls=identity)
    try:
        server.start()
    except TransportError:
        pytest.skip("no IPv6 loopback here")
    assert dial(server.join_address("run")).status() == {"status": "running"}
    server.stop()


# --- an authority of the user's own


class Authority:
    """Signs certificates."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign("authority", self.key, x509.BasicConstraints(True, None))

    def issue(self, name: str) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._sign(name, key, x509.SubjectAlternativeName([x509.DNSName(name)])), pem

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder(
            named("authority"), named(name), key.public_key(), x509.random_serial_number()
        )
        builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        signed = builder.add_extension(extension, critical=False).sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


def test_mutual_tls_lets_in_only_who_both_sides_authority_knows(serve, dial, handler):
    ours, theirs = Authority(), Authority()
    server = serve(tls=ServerIdentity(*ours.issue("localhost"), client_ca=ours.certificate))
    address = replace(server.join_address("run", host="localhost"), fingerprint=None)
    good = ClientIdentity(ours.certificate, *ours.issue("learner"))
    assert dial(address, identity=good).status() == {"status": "running"}
    assert dial(server.join_address("run", host="localhost"), identity=good).status() == {"status": "running"}
    handler.entered.clear()
    strangers = {
        "no certificate": ClientIdentity(ours.certificate),
        "another authority's learner": ClientIdentity(ours.certificate, *theirs.issue("learner")),
        "another authority's syncer": ClientIdentity(theirs.certificate, *ours.issue("learner")),
    }
    for identity in strangers.values():
        with pytest.raises(TransportError):
            dial(address, identity=identity, control_deadline_s=2.0).status()
    assert not handler.entered.is_set()


def test_a_certificate_for_another_host_is_refused(serve, dial, handler):
    ours = Authority()
    server = serve(tls=ServerIdentity(*ours.issue("elsewhere.example.org")))
    address = replace(server.join_address("run", host="localhost"), fingerprint=None)
    with pytest.raises(TransportError):
        dial(address, identity=ClientIdentity(ours.certificate)).status()
    assert not handler.entered.is_set()


# --- dead and frozen peers


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


def test_a_cut_line_ends_a_waiting_poll_at_once(serve, dial, handler, pool):
    server = serve()
    with FaultProxy(server.address) as proxy:
        connection = dial(server.join_address("run"), through=proxy)
        waiting = pool.submit(connection.poll, "s", 0, 30.0)
        assert handler.entered.wait(5)
        proxy.cut()
        with pytest.raises(TransportError):
            waiting.result(2)


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


def test_after_a_missed_deadline_a_new_connection_is_made(served, dial, handler):
    with FaultProxy(served.address) as proxy:
        connection = dial(served.join_address("run"), through=proxy, control_deadline_s=0.5)
        connection.status()
        proxy.hold()  # what is there swallows everything, what is new gets through
        with pytest.raises(TransportError, match=r"of 0\.5 s"):
            connection.status()
        assert connection.status() == {"status": "running"}


def test_an_upload_frozen_half_way_gives_its_memory_back_at_its_deadline(serve, dial, pool, eventually):
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
def test_a_quiet_poll_outlasts_the_probes_of_the_line(serve, dial):
    """A server drops a line after some 5 s of probes without data; so they must be few."""
    connection = dial(serve().join_address("run"), keepalive_s=0.5)
    assert connection.poll("s", 0, 8.0).messages == ()


def test_nobody_there_is_a_transport_error_with_address_and_advice(serve, dial, identity):
    server = serve(tls=identity)
    address = server.join_address("run")
    server.stop()
    with pytest.raises(TransportError, match=f"{address.host_port}.*must.*check"):
        dial(address).status()


def test_control_polls_and_bulk_have_a_tcp_connection_each(serve, dial):
    server = serve()
    with FaultProxy(server.address) as proxy:
        connection = dial(server.join_address("run"), through=proxy)
        assert proxy.num_connections == 0
        for call in every_call(connection):
            call()
        assert proxy.num_connections == 3


def test_bytes_at_the_socket_are_the_payload_and_little_more(serve, dial, identity):
    server = serve(tls=identity)
    with FaultProxy(server.address) as proxy:
        dial(server.join_address("run"), through=proxy).put(bulk(8 * MIB), deadline_s=10)
        assert 8 * MIB < proxy.bytes_up < 8.1 * MIB
        assert proxy.bytes_down < 0.1 * MIB


def test_stop_is_quick_although_a_poll_waits_and_may_be_repeated(serve, dial, handler, pool):
    server = serve()
    waiting = pool.submit(dial(server.join_address("run")).poll, "s", 0, 30.0)
    assert handler.entered.wait(5)
    began_s = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - began_s < 1.5
    with pytest.raises(TransportError):
        waiting.result(5)


def test_a_port_that_is_taken_is_a_transport_error(serve, handler):
    taken = serve().address
    with pytest.raises(TransportError, match="cannot listen"):
        FlightServer(handler, taken, token="tok").start()


def test_an_address_is_known_only_after_start(handler):
    with pytest.raises(LocalError, match="start"):
        _ = FlightServer(handler, "127.0.0.1:0", token="tok").address
