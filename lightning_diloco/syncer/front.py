"""Where a run is served: the address, and the token that lets others in, which may be replaced while it is served.

1. RUN_DIR/join holds both. If its token is replaced (`learner/rotation.py`), the server is made anew with the new one:
   calls under way end, and nothing gets in with the old token any more.
2. An address that is not free yet is tried again, at every look.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from pathlib import Path

from lightning_diloco.errors import ConfigError, TransportError
from lightning_diloco.transport.address import JoinAddress, read_join_file, split_host_port, write_join_file
from lightning_diloco.transport.base import Handler
from lightning_diloco.transport.flight import FlightServer
from lightning_diloco.transport.identity import ServerIdentity

log = logging.getLogger(__name__)


class Front:
    """The server of a run.

    Args:
        handler: is served.
        run_dir: RUN_DIR.
        listen: host:port; port 0 for any, which is then kept.
        address: run id and token.
        identity: who the server is; None: a certificate is made, anew for each token.
    """

    def __init__(
        self, handler: Handler, run_dir: Path, listen: str, address: JoinAddress, identity: ServerIdentity | None
    ) -> None:
        self._handler, self._identity = handler, identity
        self._join, self._host = run_dir / "join", _reachable_host(listen)
        self._address = address
        self._server = self._made(listen)
        self._seen_ns: int | None = None
        self._must_listen = False

    def _made(self, listen: str) -> FlightServer:
        return FlightServer(self._handler, listen, token=self._address.token, tls=self._identity)

    def listen(self) -> JoinAddress:
        """Serve, and write down how to join.

        Raises:
            TransportError: the address is taken, or not of this machine.
        """
        self._server.start()
        self._must_listen = False
        self._address = self._server.join_address(self._address.run, self._host)
        write_join_file(self._join, self._address)
        self._seen_ns = self._written_ns()
        return self._address

    def follow_rotation(self) -> None:
        """Look, cheaply, whether the token was replaced; if so, serve with the new one."""
        if (written_ns := self._written_ns()) != self._seen_ns:
            self._seen_ns = written_ns
            self._take_token()
        if self._must_listen:
            try:
                log.warning("the token of the run was replaced; it is served at %s", self.listen())
            except TransportError as error:
                log.warning("not served with the new token yet: %s", error)

    def _take_token(self) -> None:
        try:
            known = read_join_file(self._join)
        except ConfigError as error:
            log.warning("the token stays as it was: %s", error)
            return
        if known.run != self._address.run or known.token == self._address.token:
            return
        self._address = replace(self._address, token=known.token)
        listened_on = self._server.address
        self._server.stop()
        self._server, self._must_listen = self._made(listened_on), True

    def stop(self) -> None:
        """Serve no longer; idempotent."""
        self._server.stop()

    def _written_ns(self) -> int | None:
        try:
            return self._join.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _reachable_host(listen: str) -> str | None:
    """How learners elsewhere reach this machine when it listens on every address."""
    host, _ = split_host_port(listen)
    if host in ("0.0.0.0", "::"):
        return os.environ.get("DILOCO_HOST") or socket.getfqdn()
    return None
