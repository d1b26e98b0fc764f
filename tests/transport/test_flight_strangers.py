"""Who has no token, or another certificate than the one that was pinned, is refused before anything is read."""

from __future__ import annotations

import datetime
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pyarrow import flight

from lightning_diloco.errors import AuthError, ConfigError, TransportError
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from lightning_diloco.transport.identity import ClientIdentity, ServerIdentity
from tests.transport.conftest import every_call, raw_client


def test_a_wrong_token_is_an_auth_error_on_every_call(served, dial, handler):
    address = served.join_address("run")
    for call in every_call(dial(replace(address, token="stolen-guess"))):
        with pytest.raises(AuthError, match="refused the token") as caught:
            call()
        assert not isinstance(caught.value.__cause__, flight.FlightError), "Arrow's own traceback would be read first"
    assert not handler.entered.is_set()


def test_a_call_without_a_token_is_refused_even_if_the_handshake_was_passed(serve, handler):
    with (
        raw_client(serve().join_address("run")) as client,
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


def test_who_listens_without_tls_never_sees_the_token_of_a_pinned_address(dial):
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(1) as impostor:

        def heard() -> bytes:
            line, _ = taken.accept()
            with line:
                said = line.recv(1 << 16)
                line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                return said

        said = impostor.submit(heard)
        address = JoinAddress("127.0.0.1", taken.getsockname()[1], "run", "sesame", "0" * 64)
        with pytest.raises(TransportError, match="no certificate"):
            dial(address).status()
        assert b"sesame" not in said.result()


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


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_dialling_without_a_certificate_hash_is_refused_at_construction(host):
    with pytest.raises(ConfigError, match="certificate hash"):
        FlightConnection(JoinAddress(host, 7, "run", "tok"))


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
