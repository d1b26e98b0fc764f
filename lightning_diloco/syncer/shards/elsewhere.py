"""Shards on other machines: how a shard and its syncer find each other.

1. A shard gets RUN_DIR/standby of the syncer, which has the address and the key of the run. It fetches the run's
   certificate, and then reports where it listens until the syncer has attached.
2. It reports again whenever no syncer is attached. So either of them may be restarted, and a shard may move to another
   address with its directory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from lightning_diloco.errors import AuthError, ConfigError, RemoteError, ShardError, TransportError
from lightning_diloco.process.retry import problem_of
from lightning_diloco.storage.files import make_directory
from lightning_diloco.syncer.shards import requests as ask
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.shards.service import ShardService
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.origin import is_the_key
from lightning_diloco.transport.address import JoinAddress, placed, write_private
from lightning_diloco.transport.base import Bulk, Connection, Json
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.identity import ServerIdentity

log = logging.getLogger(__name__)

CALL_S = 5.0
REPORT_S = 1.0


class Elsewhere:
    """The shards of a run that are on other machines, at the syncer.

    Args:
        num_shards: number of shards, including the syncer.
        identity: certificate of the run.
        address: returns the address of the run, with its present token.
        key: key that shards must send.

    Attributes:
        shards: shards 1, 2, ...
    """

    def __init__(
        self, num_shards: int, identity: ServerIdentity, *, address: Callable[[], JoinAddress], key: str
    ) -> None:
        self._identity, self._address, self._key = identity, address, key
        self._places: dict[int, str] = {}
        self.shards = [self._shard((k, num_shards)) for k in range(1, num_shards)]

    def _shard(self, part: tuple[int, int]) -> RemoteShard:
        def place() -> str:
            return self._places.get(part[0], "")

        def connect() -> Connection:
            if not place():
                raise ShardError("it has not reported where it listens")
            return FlightConnection(placed(self._address(), place()))

        return RemoteShard(part, address=place, connect=connect, key=self._key)

    def on_get(self, header: Json) -> Bulk:
        """Answer a shard.

        Raises:
            AuthError: wrong key.
            ConfigError: it is none of this run's shards.
        """
        if not is_the_key(header.get("key"), self._key):
            raise AuthError("a shard called without the key of RUN_DIR/standby; give it a current copy of that file")
        request = ask.decode(header.get("request"))
        if isinstance(request, ask.AskIdentity):
            return Bulk({}, memoryview(self._identity.key + self._identity.certificate))
        if not isinstance(request, ask.Listens):
            raise TransportError(f"{type(request).__name__} is a request to a shard, not to the syncer")
        num_shards = len(self.shards) + 1
        if request.num_shards != num_shards or not 0 < request.shard < num_shards:
            raise ConfigError(
                f"shard {request.shard} of {request.num_shards} reported to a run with {num_shards} shards; start both "
                "with the same number"
            )
        self._places[request.shard] = request.address
        return Bulk({}, memoryview(b""))


def fetch_identity(invitation: Invitation, folder: Path) -> ServerIdentity:
    """Return the certificate of the run; fetch it if it is not there yet.

    Raises:
        RemoteError: the syncer cannot be reached, or refused.
    """
    file = folder / "identity.pem"
    if not file.exists():
        connection = FlightConnection(invitation.address)
        try:
            found = connection.get(ask.header(invitation.key, ask.AskIdentity()), deadline_s=CALL_S)
        finally:
            connection.close()
        make_directory(folder)
        write_private(file, bytes(found.payload))
    return ServerIdentity.load_or_create(folder)


class Reporting:
    """A thread that reports where a shard listens, while no syncer is attached.

    Args:
        invitation: address and key of the syncer.
        service: the shard.
        address: `host:port` that the syncer and learners can reach.
    """

    def __init__(self, invitation: Invitation, service: ShardService, address: str) -> None:
        self._invitation, self._service = invitation, service
        self._request = ask.Listens(*service.part, address)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-reporting", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread after its present call."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        connection, said = FlightConnection(self._invitation.address), ""
        while not self._ended.wait(REPORT_S):
            if self._service.is_polled:
                continue
            try:
                connection.get(ask.header(self._invitation.key, self._request), deadline_s=CALL_S)
            except RemoteError as error:
                if problem_of(error) != said:
                    said = problem_of(error)
                    log.warning("the address of this shard could not be reported to the syncer: %s", error)
            except ConfigError as error:  # it is none of the run's shards; the process ends with this error
                self._service.error = error
                break
        connection.close()
