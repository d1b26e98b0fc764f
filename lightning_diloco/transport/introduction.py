"""How a learner makes sure who the syncer is, and that it is let in, before gRPC connects.

1. The certificate is fetched and compared with the pinned hash; then this one certificate is trusted and nothing else.
   The fetch proves nothing; the verified TLS connection that follows does, because the peer must own the key.
2. gRPC says of a learner that is turned away just that the socket closed. Here it is told apart: who is let in is sent
   the settings of HTTP/2 at once.
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
    """The syncer's certificate, compared with the one pinned in the address.

    Args:
        address: with a fingerprint.
        shown: certificate and key of the learner, PEM.
        timeout_s: for connecting and for every step of the handshake.

    Returns:
        PEM, to be used as the only trusted root of the verified connections.

    Raises:
        AuthError: another certificate was found there, or the learner's own was refused.
        TransportError: nothing was found there in time.
    """
    started = time.monotonic()
    try:
        found, is_let_in = _introduce(address, shown, timeout_s)
        if fingerprint(found) != address.fingerprint:
            raise AuthError(
                f"the certificate of {address.host_port} has the SHA-256 {fingerprint(found)}; only the pinned "
                f"{address.fingerprint} is trusted; take the join string of the syncer that runs now, or find out who "
                "answers in its place"
            )
        if not is_let_in:  # once may be a syncer that ends at this moment
            _, is_let_in = _introduce(address, shown, timeout_s)
    except (OSError, ValueError) as error:
        raise TransportError(
            f"no certificate from {address.host_port} after {time.monotonic() - started:.1f} s "
            f"({type(error).__name__}: {error}); it must be answered with TLS within {timeout_s:.1f} s; check that the "
            "syncer runs and can be reached"
        ) from error
    if not is_let_in:
        raise refused_token(address)
    return found


def refused_token(address: JoinAddress) -> AuthError:
    """What to raise where the syncer refuses the token, or the certificate that follows from it."""
    return AuthError(
        f"the syncer at {address.host_port} refused the token of {address.redacted()}; it must be the one of the run "
        "that is served there; take the join string from that run's RUN_DIR/join (a syncer with an authority of its "
        "own, client_ca, wants a certificate by that: ClientIdentity)"
    )


def _introduce(address: JoinAddress, shown: tuple[bytes, bytes], timeout_s: float) -> tuple[bytes, bool]:
    """The certificate that was found, PEM, and whether the one that was shown is accepted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # compared by its hash instead
    context.set_alpn_protocols(["h2"])
    with tempfile.TemporaryDirectory(prefix="diloco-") as directory:  # 0700; ssl reads certificates from files alone
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
