"""Certificates are made once, kept, and checked."""

from __future__ import annotations

import datetime
import hashlib
import ssl

import pytest
from cryptography import x509

from lightning_diloco.errors import ConfigError
from lightning_diloco.transport.identity import HOSTNAME, ServerIdentity, server_name


def test_an_identity_is_kept_over_restarts(tmp_path):
    first = ServerIdentity.load_or_create(tmp_path / "tls")
    assert ServerIdentity.load_or_create(tmp_path / "tls") == first
    assert ServerIdentity.load_or_create(tmp_path / "other").fingerprint != first.fingerprint


def test_files_of_an_identity_are_private(tmp_path):
    ServerIdentity.load_or_create(tmp_path / "tls")
    assert [p.stat().st_mode & 0o777 for p in (tmp_path / "tls").iterdir()] == [0o600]
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700


def test_the_fingerprint_is_the_sha256_of_the_der(identity):
    der = ssl.PEM_cert_to_DER_cert(identity.certificate.decode())
    assert identity.fingerprint == hashlib.sha256(der).hexdigest()
    assert server_name(identity.certificate) == HOSTNAME


def test_a_new_certificate_is_valid_for_a_learner_whose_clock_is_years_behind_or_ahead(identity):
    certificate = x509.load_pem_x509_certificate(identity.certificate)
    now = datetime.datetime.now(datetime.timezone.utc)
    assert certificate.not_valid_before_utc == datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    assert certificate.not_valid_after_utc > now + datetime.timedelta(days=3600)


def test_the_key_is_not_shown(identity):
    assert "PRIVATE" not in repr(identity)


def test_a_broken_identity_file_is_a_config_error_not_a_new_identity(tmp_path):
    (tmp_path / "identity.pem").write_bytes(b"half a key")
    with pytest.raises(ConfigError, match=r"identity\.pem"):
        ServerIdentity.load_or_create(tmp_path)
    assert (tmp_path / "identity.pem").read_bytes() == b"half a key"


def test_a_key_of_another_certificate_is_refused(tmp_path, identity):
    (tmp_path / "identity.pem").write_bytes(ServerIdentity.create().key + identity.certificate)
    with pytest.raises(ConfigError, match="belong together"):
        ServerIdentity.load_or_create(tmp_path)
