"""Client certificates made from the token, so that the TLS handshake fails without the token.

1. The syncer and the learners derive the same key pair from the token (HKDF-SHA256, EC P-256). The syncer trusts
   certificates signed by this key. Each learner signs a certificate for itself.
2. A connection without the token therefore ends before the server reads a call. If the server only checked the token in
   the header of a call, gRPC would read the whole body of the call first.
3. A token has 256 random bits (`new_token`), so the public key reveals nothing about it.
"""

from __future__ import annotations

import datetime
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

_PURPOSE = b"lightning_diloco learners 1"
_AUTHORITY, _LEARNER = "diloco-token", "diloco-learner"
_FROM, _UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(2200, 1, 1)  # valid for any clock of a learner
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def learners_authority(token: str) -> bytes:
    """Return the certificate that the syncer verifies learners with, PEM."""
    key = _key_of(token)
    return _signed(_AUTHORITY, key.public_key(), key, is_authority=True)


@cache
def learner_certificate(token: str) -> tuple[bytes, bytes]:
    """Return a learner's certificate and key, PEM; made once per process."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return _signed(_LEARNER, key.public_key(), _key_of(token), is_authority=False), pem


def _key_of(token: str) -> ec.EllipticCurvePrivateKey:
    # 384 bits, so that the remainder is uniform (FIPS 186-5, A.2.1).
    drawn = HKDF(hashes.SHA256(), length=48, salt=None, info=_PURPOSE).derive(token.encode())
    return ec.derive_private_key(int.from_bytes(drawn, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def _signed(
    subject: str, public_key: ec.EllipticCurvePublicKey, by: ec.EllipticCurvePrivateKey, *, is_authority: bool
) -> bytes:
    subject_name, issuer_name = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, _AUTHORITY)
    )
    builder = x509.CertificateBuilder(issuer_name, subject_name, public_key, x509.random_serial_number())
    builder = builder.not_valid_before(_FROM).not_valid_after(_UNTIL)
    builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
