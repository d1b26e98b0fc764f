"""Asks a syncer for its state, in a thread of its own: one that does not answer holds up nobody.

A syncer that starts, ends or is busy for a moment is silent: an answer counts as the latest, and no silence as a
problem, until a while has passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.transport.address import JoinAddress

Status = Mapping[str, Any]
Fetch = Callable[[], Status]


class StatusFeed:
    """The latest answer to a question asked every period.

    Args:
        fetch: returns the syncer's state; called from the feed's thread only.
        period_s: pause between an answer and the next question.
        patience_s: how long a silence is no problem.
    """

    def __init__(self, fetch: Fetch, *, period_s: float = 0.5, patience_s: float = 3.0) -> None:
        self._fetch = fetch
        self._period_s = period_s
        self._patience_s = patience_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="diloco-status", daemon=True)
        self.latest: Status | None = None
        self.problem: str | None = None

    def __enter__(self) -> StatusFeed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(timeout=0.5)

    def _ask(self) -> None:
        answered_s = time.monotonic()
        while not self._closing.is_set():
            try:
                self.latest, self.problem = self._fetch(), None
                answered_s = time.monotonic()
            except Exception as error:  # whatever it is: a run does not end because it cannot be watched
                if time.monotonic() - answered_s >= self._patience_s:
                    self.latest, self.problem = None, str(error) if isinstance(error, DiLoCoError) else repr(error)
            self._closing.wait(self._period_s)


@contextmanager
def asking(address: JoinAddress, join: Path | None = None) -> Iterator[Fetch]:
    """A way to ask the syncer at this address, while the block lasts; a join file says if its token was replaced."""
    from lightning_diloco.learner.rotation import Followed
    from lightning_diloco.transport.flight import FlightConnection

    connection = Followed(FlightConnection, address, join)
    try:
        yield connection.status
    finally:
        connection.close()
