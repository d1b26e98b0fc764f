"""Refuse calls and report the progress while a syncer reads its disk."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_diloco.errors import RestoringError
from lightning_diloco.transport.base import Bulk, Handler, Json, Polled


class RestoringHandler:
    """A `Handler` that refuses calls until the service is ready, and then forwards them."""

    def __init__(self) -> None:
        self._service: Handler | None = None
        self._doing = "starting"

    def tell(self, doing: str) -> None:
        """Set the progress, which the error of a refused call reports."""
        self._doing = doing

    def open(self, service: Handler) -> None:
        """Forward calls to this service from now on."""
        self._service = service

    def on_send(self, session: str, messages: Sequence[Json]) -> Json:
        return self._inner.on_send(session, messages)

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        return self._inner.on_poll(session, cursor, wait_s)

    def on_put(self, bulk: Bulk) -> Json:
        return self._inner.on_put(bulk)

    def on_get(self, header: Json) -> Bulk:
        return self._inner.on_get(header)

    def on_status(self) -> Json:
        return self._inner.on_status()

    @property
    def _inner(self) -> Handler:
        if self._service is None:
            raise RestoringError(
                f"the syncer restores its run ({self._doing}); nothing of the call was used; wait until it is ready"
            )
        return self._service
