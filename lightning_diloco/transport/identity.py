"""TLS identities of syncer and learners.

1. By default the syncer makes its own certificate and keeps it over restarts. Its SHA-256 is part of the join string.
2. A learner trusts only this certificate (`introduction`). It presents a certificate made from the token
   (`token_identity`), so each side verifies the other.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lightning_diloco.errors import ConfigError
from lightning_diloco.transport.address import write_private

HOSTNAME = "diloco-syncer"
_VALID = datetime.timedelta(days=3650)
_FROM = datetime.datetime(2020, 1, 1)  # valid for a learner whose clock is behind


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """A certificate and its key.

    Args:
        certificate: PEM.
        key: PEM, not encrypted.
    """

    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate (DER), 64 hex digits."""
        return fingerprint(self.certificate)

    @classmethod
    def create(cls) -> ServerIdentity:
        """Make a self-signed certificate (EC P-256, valid for ten years)."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOSTNAME)])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_FROM)
            .not_valid_after(now + _VALID)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOSTNAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return cls(
            certificate.public_bytes(pem),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )

    @classmethod
    def load_or_create(cls, directory: str | os.PathLike[str]) -> ServerIdentity:
        """Load the identity of a directory. If there is none, make a new identity, in a file of mode 0600."""
        file = Path(directory) / "identity.pem"
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = cls.create()
            write_private(file, made.key + made.certificate)
        key, marker, certificate = file.read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
        return _checked(cls(marker + certificate, key), str(file))


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a PEM certificate's DER form, 64 hex digits."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first(certificate))).hexdigest()


def server_name(certificate: bytes) -> str:
    """Return the first DNS name of a PEM certificate, which is used to verify a pinned certificate."""
    parsed = x509.load_pem_x509_certificate(certificate)
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    return next(iter(names.get_values_for_type(x509.DNSName)), "")


def _first(certificate: bytes) -> str:
    end = "-----END CERTIFICATE-----"
    text = certificate.decode("ascii", errors="replace")
    return text[text.find("-----BEGIN") : text.find(end) + len(end)]


def _checked(identity: ServerIdentity, source: str) -> ServerIdentity:
    """Check an identity; gRPC would fail later without naming the file."""
    try:
        certified = x509.load_pem_x509_certificate(identity.certificate).public_key()
        owned = serialization.load_pem_private_key(identity.key, password=None).public_key()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"identity in {source!r} cannot be read ({error}); must be a PEM certificate and an unencrypted PEM key; "
            "delete a broken one that the syncer made to get a new one (its join strings become invalid)"
        ) from error
    if certified != owned:
        raise ConfigError(f"identity in {source!r}: certificate and key must belong together; give a matching pair")
    return identity
