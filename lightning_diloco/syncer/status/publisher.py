"""What a syncer can tell at any moment: its status for people, and the short news that learners get with every answer.

1. Everything here is looked at from transport threads. The machine is read only under `looking`; the news is made anew
   by the loop thread and replaced as a whole.
2. `recent` keeps the last events that people may want to know, with the time and a number that grows.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping

from msgspec.structs import replace

from lightning_diloco.protocol.messages import News
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.status import report
from lightning_diloco.syncer.status.history import History
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)

NUM_RECENT = 100
_TOLD = (
    "seeded", "join", "leave", "lapse", "return", "rejected", "refused", "quarantine", "release", "suspended",
    "resumed", "regenerated", "evaluated",
)  # fmt: skip


class StatusPublisher:
    """The public face of one syncer.

    Args:
        state: the machine.
        desk: counts bytes.
        past: of the run, before this process.
    """

    def __init__(self, state: SyncerState, desk: Payloads, past: History | None = None) -> None:
        self._state = state
        self._past = past or History()
        self._desk = desk
        self._started_s = time.monotonic()
        self._began_s = self._started_s if self._past.began_s is None else self._past.began_s
        self._disk: tuple[str, float] | None = None
        self._numbers = itertools.count()
        self._recent: deque[Json] = deque(maxlen=NUM_RECENT)
        self._cosines: dict[str, float | None] = {}
        self._news = News()
        self.looking = threading.Lock()

    # ------------------------------------------------------------------------------------------------------- is told

    def refresh(self) -> None:
        """Loop thread, often: make the news anew."""
        self._news = News(len(self._state.roster.live()), float(self._state.ledger.seen))

    def noted(self, event: str, fields: Mapping[str, object]) -> None:
        """Something happened; what people may want to know is kept for a while."""
        if event in _TOLD:
            self._recent.append({"number": next(self._numbers), "t": time.time(), "event": event, **fields})

    def merged(self, sessions: tuple[str, ...], cosines: tuple[float, ...]) -> None:
        """A commit was made of these contributions."""
        for session, cosine in zip(sessions, cosines, strict=True):
            self._cosines[session] = cosine if math.isfinite(cosine) else None  # JSON knows no other

    def disk_failed(self, error: str) -> None:
        """The disk did not take something."""
        if self._disk is None:
            log.error("nothing is committed until the disk takes it, learners train on: %s", error)
            self.noted("suspended", {"reason": error})
        self._disk = (error, time.monotonic() if self._disk is None else self._disk[1])

    def disk_works(self) -> None:
        """The disk took something."""
        if self._disk is not None:
            log.warning("the disk takes what is written again")
            self.noted("resumed", {})
        self._disk = None

    # --------------------------------------------------------------------------------------------------------- tells

    def age_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began_s

    def news(self, session: str) -> News:
        """The news for this session."""
        return replace(self._news, cosine=self._cosines.get(session))

    def status(self) -> Json:
        """The run as people see it."""
        with self.looking:
            uptime_s = time.monotonic() - self._started_s
            status = report.status(self._state, disk=self._disk, uptime_s=uptime_s, **self._figures())
        return {**status, "recent": list(self._recent)}

    def summary(self, status: str) -> Json:
        """The run as it ends."""
        return report.summary(self._state, status=status, wall_s=self.age_s(), **self._figures())

    def _figures(self) -> Json:
        past, desk = self._past, self._desk
        up, down = past.bytes_up + desk.bytes_up, past.bytes_down + desk.bytes_down
        return {"now_s": time.monotonic(), "pauses": past.pauses, "bytes_up": up, "bytes_down": down}
