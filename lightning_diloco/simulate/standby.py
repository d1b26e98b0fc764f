"""The standby of a simulated syncer: the records that it has, and the calls of the primary that wait for them.

`protocol/syncer/succession.py` decides which of the two serves the run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_diloco.simulate.timeline import Timeline


class Standby:
    """Receives the records of a log in order.

    Args:
        delay_s: time until a short record, or the report that it has arrived, is received.
        commit_s: additional time of a commit, and of the records behind it.
        has: number of records that it has.
        timeline: simulated time.

    Attributes:
        has: number of records that it has.
        is_cut: whether the network between the primary and it is cut.
    """

    def __init__(self, *, delay_s: float, commit_s: float, has: int, timeline: Timeline) -> None:
        self.has = has
        self.is_cut = False
        self._delay_s, self._commit_s, self._timeline = delay_s, commit_s, timeline
        self._link_is_free_s = 0.0
        self._newest = self._reported = has
        self._waiting: list[tuple[int, Callable[[], object]]] = []

    def send(self, num_records: int, *, is_commit: bool = False) -> None:
        """Send it all records up to this number, the last of which may be a commit."""
        self._newest, now_s = num_records, self._timeline.now_s
        self._link_is_free_s = max(now_s, self._link_is_free_s) + self._commit_s * is_commit
        self._timeline.after(self._link_is_free_s - now_s + self._delay_s, partial(self._receive, num_records))

    def heal(self) -> None:
        """Restore the network; it asks for the records that it lacks."""
        self.is_cut = False
        self.send(self._newest)

    def wait(self, num_records: int, call: Callable[[], object]) -> None:
        """Call a function when it has reported this number of records; at once, if it has."""
        if num_records <= self._reported:
            call()
        else:
            self._waiting.append((num_records, call))

    def is_awaited(self, num_records: int) -> bool:
        """Return whether it has not reported this number of records yet."""
        return num_records > self._reported

    def give_up(self) -> None:
        """Make all calls that wait for this standby."""
        self._report(self._newest)

    def forget(self) -> None:
        """Drop all waiting calls, because the primary was killed."""
        self._waiting.clear()

    def _receive(self, num_records: int) -> None:
        if not self.is_cut:
            self.has = max(self.has, num_records)
            self._timeline.after(self._delay_s, partial(self._arrived, self.has))

    def _arrived(self, num_records: int) -> None:
        if not self.is_cut:
            self._report(num_records)

    def _report(self, num_records: int) -> None:
        self._reported = max(self._reported, num_records)
        waiting, self._waiting = self._waiting, []
        for number, call in waiting:
            self.wait(number, call)
