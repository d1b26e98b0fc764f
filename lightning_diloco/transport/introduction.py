"""Check the syncer's certificate, and whether the syncer accepts the learner's certificate, before gRPC connects.

1. The learner fetches the certificate and compares it with the pinned hash. From then on it trusts only this
   certificate. The fetch alone does not prove that the peer has the private key. The verified TLS connection that
   follows proves it.
2. If a syncer refuses the learner's certificate, gRPC only reports a closed socket. This check finds the reason: a
   syncer that accepts the certificate sends HTTP/2 settings at once.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
import time
from pathlib import Path

from lightning_diloco.errors import AuthError, TransportError
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.identity import fingerprint


def pinned_certificate(address: JoinAddress, shown: tuple[bytes, bytes], timeout_s: float) -> bytes:
    """Fetch the syncer's certificate and compare it with the fingerprint in the address.

    Args:
        address: address with a fingerprint.
        shown: certificate and key of the learner, PEM.
        timeout_s: limit for connecting and for each step of the handshake.

    Returns:
        The certificate, PEM, for use as the only trusted root.

    Raises:
        AuthError: the syncer has another certificate, or refused the learner's certificate.
        TransportError: no certificate arrived in time.
    """
    started = time.monotonic()
    try:
        found, is_let_in = _introduce(address, shown, timeout_s)
        if fingerprint(found) != address.fingerprint:
            raise AuthError(
                f"the certificate of {address.host_port} has the SHA-256 {fingerprint(found)}; only the pinned "
                f"{address.fingerprint} is trusted; use the join string of the syncer that runs now, or find out which "
                "program answers there"
            )
        if not is_let_in:  # try again, because the syncer may be stopping
            _, is_let_in = _introduce(address, shown, timeout_s)
    except (OSError, ValueError) as error:
        raise TransportError(
            f"no certificate from {address.host_port} after {time.monotonic() - started:.1f} s "
            f"({type(error).__name__}: {error}); a TLS server must answer within {timeout_s:.1f} s; check that the "
            "syncer runs and can be reached"
        ) from error
    if not is_let_in:
        raise refused_token(address)
    return found


def refused_token(address: JoinAddress) -> AuthError:
    """Return the error to raise if the syncer refuses the token, or the certificate made from it."""
    return AuthError(
        f"the syncer at {address.host_port} refused the token of {address.redacted()}; it must be the token of the run "
        "that is served there; use the join string in that run's RUN_DIR/join"
    )


def _introduce(address: JoinAddress, shown: tuple[bytes, bytes], timeout_s: float) -> tuple[bytes, bool]:
    """Return the syncer's certificate, PEM, and whether the syncer accepts the learner's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # verified by its hash instead
    context.set_alpn_protocols(["h2"])
    with tempfile.TemporaryDirectory(
        prefix="diloco-"
    ) as directory:  # mode 0700; ssl reads certificates only from files
        file = Path(directory, "shown.pem")
        file.write_bytes(shown[0] + shown[1])
        context.load_cert_chain(file)
    timeout_s = max(timeout_s, 0.001)
    with (
        socket.create_connection((address.host, address.port), timeout=timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as line,
    ):
        certificate = ssl.DER_cert_to_PEM_cert(line.getpeercert(binary_form=True) or b"").encode()
        try:
            return certificate, bool(line.recv(1))
        except (ConnectionError, ssl.SSLError):
            return certificate, False
