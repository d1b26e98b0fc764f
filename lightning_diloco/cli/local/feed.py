"""Polls a syncer for its state in a background thread, so that a syncer that does not answer does not block the caller.

A syncer may be silent for a moment while it starts, stops or is busy. The last answer stays valid, and the silence is
not reported as a problem, until `patience_s` has passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_diloco.errors import DiLoCoError, RemoteError, RestoringError
from lightning_diloco.transport.address import JoinAddress

Status = Mapping[str, Any]
Fetch = Callable[[], Status]
_ANSWER_S = 2.0


class StatusFeed:
    """The latest state of a syncer that is polled every period.

    Args:
        fetch: returns the syncer's state; called from the feed's thread only.
        period_s: pause between an answer and the next request.
        patience_s: silence in seconds that is tolerated.
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
            except Exception as error:  # any error: a display problem must not end the run
                if time.monotonic() - answered_s >= self._patience_s:
                    self.latest, self.problem = None, str(error) if isinstance(error, DiLoCoError) else repr(error)
            self._closing.wait(self._period_s)


@contextmanager
def asking(address: JoinAddress, join: Path | None = None) -> Iterator[Fetch]:
    """Yield a function that fetches the state of the syncer at this address; the file `join` has its current token."""
    from lightning_diloco.learner.rotation import RedialingConnection
    from lightning_diloco.transport.flight import FlightConnection

    connection = RedialingConnection(FlightConnection, address, join)
    try:
        yield connection.status
    finally:
        connection.close()


def answers(address: JoinAddress, *, while_restoring: bool = False) -> bool:
    """Return whether a syncer at this address accepts its token.

    Args:
        address: address and token.
        while_restoring: what to return if the syncer is being restored.
    """
    from lightning_diloco.transport.flight import FlightConnection

    connection = FlightConnection(address, control_deadline_s=_ANSWER_S)
    try:
        connection.status()
    except RestoringError:
        return while_restoring
    except RemoteError:
        return False
    finally:
        connection.close()
    return True
