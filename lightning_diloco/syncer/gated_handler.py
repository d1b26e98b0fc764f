"""Refuse calls while a syncer reads its disk, waits for its standby, or is a standby itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_diloco.errors import RestoringError
from lightning_diloco.syncer.shards.requests import SHARD
from lightning_diloco.syncer.standby.requests import STANDBY
from lightning_diloco.transport.base import Bulk, Handler, Json, Polled


class GatedHandler:
    """A `Handler` that refuses calls until the service is ready, and then forwards them.

    Attributes:
        refused: called with the session of a refused call, None for a call without one; may raise another error.
        standby: answers calls of a standby while others are refused; None refuses them as well.
        shards: answers calls of shards on other machines, at any time; None: there are none.
    """

    def __init__(self) -> None:
        self._service: Handler | None = None
        self._doing = "starting"
        self.refused: Callable[[str | None], None] = lambda session: None
        self.standby: Callable[[Json], Bulk] | None = None
        self.shards: Callable[[Json], Bulk] | None = None

    def tell(self, doing: str) -> None:
        """Set the progress, which the error of a refused call reports."""
        self._doing = doing

    def open(self, service: Handler) -> None:
        """Forward calls to this service from now on."""
        self._service = service

    def close(self) -> None:
        """Refuse calls again."""
        self._service = None

    def on_send(self, session: str, messages: Sequence[Json]) -> Json:
        return self._inner(session).on_send(session, messages)

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        return self._inner(session).on_poll(session, cursor, wait_s)

    def on_put(self, bulk: Bulk) -> Json:
        return self._inner().on_put(bulk)

    def on_get(self, header: Json) -> Bulk:
        if self.shards is not None and header.get("what") == SHARD:
            return self.shards(header)
        if self._service is None and self.standby is not None and header.get("what") == STANDBY:
            return self.standby(header)
        return self._inner().on_get(header)

    def on_status(self) -> Json:
        return self._inner().on_status()

    def _inner(self, session: str | None = None) -> Handler:
        service = self._service  # `close` may come in between
        if service is None:
            self.refused(session)
            raise RestoringError(
                f"the syncer restores its run ({self._doing}); nothing of the call was used; wait until it is ready"
            )
        return service
