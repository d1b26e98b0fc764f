"""The syncer's status for users, and the short news that learners get with each answer.

1. Transport threads call this module. They read the state machine only under the lock `looking`. The loop thread
   replaces the news as a whole.
2. `recent` holds the last events of interest to users, with their times and increasing numbers.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from lightning_diloco.protocol.messages import News
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.syncer.payloads import Payloads
from lightning_diloco.syncer.run_end import RunEnd
from lightning_diloco.syncer.shards.remote import RemoteShard
from lightning_diloco.syncer.standby.replica import Replica
from lightning_diloco.syncer.status import report
from lightning_diloco.syncer.status.history import History
from lightning_diloco.transport.base import Json

log = logging.getLogger(__name__)

NUM_RECENT = 100
TOLD = (
    "seeded", "join", "leave", "lapse", "return", "rejected", "refused", "quarantine", "release", "suspended",
    "resumed", "regenerated", "evaluated", "stood still", "restarted", "took over", "standby joined", "standby lost",
    "shard away", "shard back",
)  # fmt: skip


class StatusPublisher:
    """Publishes status and news of one syncer.

    Args:
        state: the state machine.
        desk: payloads, which count bytes.
        past: history of the run before this process.
        ending: decides when the run ends; None: it does not end by itself.
        replica: the standby; None: there can be none.
        shards: shards in other processes.
    """

    def __init__(
        self,
        state: SyncerState,
        desk: Payloads,
        past: History | None = None,
        ending: RunEnd | None = None,
        replica: Replica | None = None,
        *,
        shards: Sequence[RemoteShard] = (),
    ) -> None:
        self._state = state
        self._past = past or History()
        self._ending = ending or RunEnd(expect=None, embedded_by=None)
        self._desk, self._replica, self._shards = desk, replica, shards
        self._started_s = time.monotonic()
        self._began_s = self._started_s if self._past.began_s is None else self._past.began_s
        self._disk: tuple[str, float] | None = None
        self._numbers = itertools.count()
        self._recent: deque[Json] = deque(maxlen=NUM_RECENT)
        self._cosines: dict[str, float | None] = {}
        self._news = News()
        self.looking = threading.Lock()

    # --------------------------------------------------------------------------------------------------------- input

    def refresh(self) -> None:
        """Update the news. The loop thread calls this at each tick."""
        standby = None if self._replica is None else self._replica.address
        num_learners, fleet_tokens = len(self._state.roster.live()), float(self._state.ledger.seen)
        self._news = News(num_learners, fleet_tokens, standby=standby)

    def noted(self, event: str, fields: Mapping[str, object], *, late_s: float = 0.0) -> None:
        """Keep an event in `recent` if it is of interest to users; it happened `late_s` seconds ago."""
        if event in TOLD:
            self._recent.append({"number": next(self._numbers), "t": time.time() - late_s, "event": event, **fields})

    def merged(self, sessions: tuple[str, ...], cosines: tuple[float, ...]) -> None:
        """Keep the cosines of the contributions to a commit."""
        for session, cosine in zip(sessions, cosines, strict=True):
            self._cosines[session] = cosine if math.isfinite(cosine) else None  # JSON has no NaN

    def disk_failed(self, error: str) -> None:
        """Record that a write to disk failed."""
        if self._disk is None:
            log.error("commits wait until the disk can be written again, learners train on: %s", error)
            self.noted("suspended", {"reason": error})
        self._disk = (error, time.monotonic() if self._disk is None else self._disk[1])

    def disk_works(self) -> None:
        """Record that a write to disk succeeded."""
        if self._disk is not None:
            log.warning("the disk can be written again")
            self.noted("resumed", {})
        self._disk = None

    # -------------------------------------------------------------------------------------------------------- output

    def age_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._began_s

    def news(self, session: str) -> News:
        """Return the news for a session."""
        return replace(self._news, cosine=self._cosines.get(session), shards=self._shard_addresses())

    def _shard_addresses(self) -> tuple[str, ...]:
        return tuple(shard.address for shard in self._shards)

    def status(self) -> Json:
        """Return the status of the run."""
        standby = None if self._replica is None else self._replica.status()  # it takes the two locks in this order
        shards = [shard.status() for shard in self._shards]
        with self.looking:
            figures = self._figures()
            uptime_s = figures["now_s"] - self._started_s
            end_s = self._ending.waits_until_s(self._state, figures["now_s"])
            about = {"disk": self._disk, "standby": standby, "shards": shards, "end_s": end_s, "uptime_s": uptime_s}
            status = report.status(self._state, **about, **figures)
        return {**status, "recent": list(self._recent)}

    def summary(self, status: str) -> Json:
        """Return the summary of the run."""
        return report.summary(self._state, status=status, wall_s=self.age_s(), **self._figures())

    def _figures(self) -> Json:
        past, desk = self._past, self._desk
        each = (past, desk, *self._shards)
        up, down = sum(it.bytes_up for it in each), sum(it.bytes_down for it in each)
        return {"now_s": time.monotonic(), "pauses": past.pauses, "bytes_up": up, "bytes_down": down}
