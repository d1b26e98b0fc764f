"""The server of a run, and the replacement of its token.

1. RUN_DIR/join holds address and token. If the token there is replaced (`learner/rotation.py`), a new server with the
   new token replaces the old server. Running calls end, and the syncer refuses the old token from then on.
2. If the address is not free yet, each call of `follow_rotation` tries again.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_diloco.errors import ConfigError, TransportError
from lightning_diloco.process.malloc import return_free_memory
from lightning_diloco.transport.address import JoinAddress, read_join_file, split_host_port, write_join_file
from lightning_diloco.transport.base import Handler
from lightning_diloco.transport.doorkeeper import Doorkeeper
from lightning_diloco.transport.flight import FlightServer
from lightning_diloco.transport.identity import ServerIdentity

log = logging.getLogger(__name__)


class Front:
    """The server of a run.

    Args:
        handler: handles the calls.
        run_dir: RUN_DIR.
        listen: host:port; port 0 for any free port, which is then kept.
        address: run id and token.
        identity: certificate of the server; None makes a new one for each token.
        written: called with the address whenever RUN_DIR/join was written.
    """

    def __init__(
        self,
        handler: Handler,
        run_dir: Path,
        listen: str,
        address: JoinAddress,
        identity: ServerIdentity | None,
        *,
        written: Callable[[JoinAddress], None] = lambda address: None,
    ) -> None:
        self._written = written
        self._handler, self._identity = handler, identity
        self._join, self._host = run_dir / "join", _reachable_host(listen)
        self._address = address
        self._server = self._made(listen)
        self._seen_ns: int | None = None
        self._must_listen = False

    def _made(self, listen: str) -> FlightServer:
        doorkeeper = partial(Doorkeeper, many_ended=return_free_memory)
        return FlightServer(self._handler, listen, token=self._address.token, tls=self._identity, doorkeeper=doorkeeper)

    def listen(self) -> JoinAddress:
        """Start to serve, and write RUN_DIR/join.

        Raises:
            TransportError: the address is in use, or not one of this machine.
        """
        self._server.start()
        self._must_listen = False
        found = self._server.join_address(self._address.run, self._host)
        self._address = replace(found, standby=self._address.standby)
        self._write()
        return self._address

    @property
    def address(self) -> JoinAddress:
        """The address of the run, with its present token."""
        return self._address

    @property
    def listens_on(self) -> str:
        """`host:port` that the server listens on."""
        return self._server.address

    def name_standby(self, standby: str | None) -> None:
        """Write this standby (`host:port`) to RUN_DIR/join, if it is not there yet. May be called often."""
        if standby not in (None, self._address.standby) and self._written_ns() == self._seen_ns:
            self._address = replace(self._address, standby=standby)
            self._write()

    def _write(self) -> None:
        write_join_file(self._join, self._address)
        self._seen_ns = self._written_ns()
        self._written(self._address)

    def follow_rotation(self) -> None:
        """Serve with the new token if the token was replaced. May be called often."""
        if (written_ns := self._written_ns()) != self._seen_ns:
            self._seen_ns = written_ns
            self._take_token()
        if self._must_listen:
            try:
                log.warning("the token of the run was replaced; the run is served at %s", self.listen())
            except TransportError as error:
                log.warning("not served with the new token yet: %s", error)

    def _take_token(self) -> None:
        try:
            known = read_join_file(self._join)
        except ConfigError as error:
            log.warning("the token is unchanged: %s", error)
            return
        if known.run != self._address.run or known.token == self._address.token:
            return
        self._address = replace(self._address, token=known.token)
        listened_on = self._server.address
        self._server.stop()
        self._server, self._must_listen = self._made(listened_on), True

    def stop(self) -> None:
        """Stop serving; idempotent."""
        self._server.stop()

    def _written_ns(self) -> int | None:
        try:
            return self._join.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _reachable_host(listen: str) -> str | None:
    """Return this machine's name for other machines if the server listens on all addresses."""
    host, _ = split_host_port(listen)
    if host in ("0.0.0.0", "::"):
        return os.environ.get("DILOCO_HOST") or socket.getfqdn()
    return None
