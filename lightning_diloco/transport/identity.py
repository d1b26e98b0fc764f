"""Who the syncer is: its certificate, and what learners are told of it.

1. By default the syncer makes its own certificate, keeps it over restarts, and its SHA-256 is part of the join string.
2. A learner trusts this one certificate and nothing else (`introduction`); it shows one that follows from the token
   (`token_identity`).
3. With a public key infrastructure of their own, users give files instead, and both sides can be verified.
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
_CLOCK_SKEW = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """A certificate and its key.

    Args:
        certificate: PEM.
        key: PEM, not encrypted.
        client_ca: PEM; the authority whose certificates let learners in; None: one that follows from the token.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate (DER), 64 hex digits."""
        return fingerprint(self.certificate)

    @classmethod
    def create(cls) -> ServerIdentity:
        """A fresh self-signed certificate (EC P-256, ten years)."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOSTNAME)])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
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
        """The identity kept in this directory; made there, with files of mode 0600, if there is none."""
        file = Path(directory) / "identity.pem"
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = cls.create()
            write_private(file, made.key + made.certificate)
        key, marker, certificate = file.read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
        return _checked(cls(marker + certificate, key), str(file))

    @classmethod
    def from_files(
        cls,
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        client_ca: str | os.PathLike[str] | None = None,
    ) -> ServerIdentity:
        """The identity in PEM files of the user's own; see the class for what they hold."""
        authority = None if client_ca is None else _read(client_ca)
        return _checked(cls(_read(certificate), _read(key), authority), str(certificate))


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """A learner's side of a public key infrastructure of the user's own.

    Args:
        server_ca: PEM; given: the syncer's certificate must be by this authority, for the host name dialled.
        certificate: PEM; given with `key`: what the learner shows.
        key: PEM, not encrypted.
    """

    server_ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_files(
        cls,
        server_ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
    ) -> ClientIdentity:
        """Read PEM files; see the class for what they hold."""
        if (certificate is None) != (key is None):
            raise ConfigError(
                f"certificate={certificate!s} and key={key!s}: must be given together or not at all; add the other file"
            )
        return cls(*(None if path is None else _read(path) for path in (server_ca, certificate, key)))


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a PEM certificate's DER form, 64 hex digits."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first(certificate))).hexdigest()


def server_name(certificate: bytes) -> str:
    """The first DNS name a PEM certificate is for; verification of a pinned one is against this."""
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


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file {str(path)!r}: {error}; must be a readable PEM file; correct the path") from error


def _checked(identity: ServerIdentity, source: str) -> ServerIdentity:
    """Refuse now what gRPC would refuse later without saying which file it was."""
    try:
        certified = x509.load_pem_x509_certificate(identity.certificate).public_key()
        owned = serialization.load_pem_private_key(identity.key, password=None).public_key()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"identity in {source!r} cannot be read ({error}); must be a PEM certificate and an unencrypted PEM key; "
            "delete a broken self-made one to get a new one (its join strings end with it)"
        ) from error
    if certified != owned:
        raise ConfigError(f"identity in {source!r}: certificate and key must belong together; give a matching pair")
    return identity
