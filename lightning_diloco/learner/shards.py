"""A learner's connection to a run with shards: each fragment is exchanged with the process that holds it.

The syncer names its shards in the answer to each message (`News.shards`). They have the syncer's token and certificate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_diloco.errors import TransportError
from lightning_diloco.learner.rotation import RedialingConnection
from lightning_diloco.transport.address import JoinAddress, placed
from lightning_diloco.transport.base import Bulk, Connection, Json
from lightning_diloco.transport.portions import Portioned


class ShardedConnection:
    """Implements `LargeConnection`; see `RedialingConnection`, the connection to shard 0, for the arguments.

    Attributes:
        shards: `host:port` of shards 1, 2, ...; without a host, it is the syncer's.
    """

    def __init__(self, connect: Callable[[JoinAddress], Connection], address: JoinAddress, join: Path | None) -> None:
        self._connect, self._syncer = connect, (syncer := RedialingConnection(connect, address, join))
        self._main = Portioned(syncer)
        self.poll, self.status, self.move_to = syncer.poll, syncer.status, syncer.move_to
        self.shards: tuple[str, ...] = ()
        self._connections: dict[int, tuple[JoinAddress, Portioned]] = {}
        self._connecting = threading.Lock()

    @property
    def heard_s(self) -> float:
        """See `Portioned`."""
        return max(each.heard_s for each in (self._main, *(shard for _, shard in list(self._connections.values()))))

    @property
    def moved_to(self) -> str | None:
        """See `RedialingConnection`."""
        return self._syncer.moved_to

    def send(self, session: str, messages: Sequence[Json]) -> Json:
        answer = self._syncer.send(session, messages)
        self.shards = tuple(answer.get("shards", ()))
        return answer

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        ready = bulk.header.get("ready")
        p = ready.get("fragment") if isinstance(ready, dict) else bulk.header.get("fragment")
        return self._of(p).put(bulk, deadline_s=deadline_s)

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        return self._of(header.get("fragment")).get(header, deadline_s=deadline_s)

    def close(self) -> None:
        with self._connecting:
            for _, connection in self._connections.values():
                connection.close()
        self._syncer.close()

    def _of(self, p: object) -> Portioned:
        """Return the connection to the process that holds this fragment; without a fragment, to the syncer."""
        shards = self.shards
        k = p % (len(shards) + 1) if isinstance(p, int) else 0
        return self._main if k == 0 else self._shard(k, shards[k - 1])

    def _shard(self, k: int, place: str) -> Portioned:
        if not place:
            raise TransportError(f"shard {k} is away; nothing was sent; try again")
        address = placed(self._syncer.address, place)
        with self._connecting:
            known, connection = self._connections.get(k, (None, None))
            if connection is None or known != address:  # it has moved, or the run has a new token
                if connection is not None:
                    connection.close()
                connection = Portioned(self._connect(address))
                self._connections[k] = address, connection
            return connection
