"""Landings and snapshots that all ranks of a learner make at the next step boundary.

Only one rank runs the state machine. It promises landings and snapshots when a step begins, so that the other ranks
receive the promise while the step computes. Updates and announcements that arrive later wait for the boundary after it.

1. A learner of one rank needs no promises. It may land and snapshot at each boundary.
2. A promised landing is always made. Messages that would remove the staged update are processed after the boundary.
3. A promised snapshot may be skipped by the rank with the state machine; the other ranks then discard their copies.

Source: our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import Promise
from lightning_diloco.protocol.learner.fragment import Fragment

_NOTHING = Promise((), ())


class Promises:
    """The promise for the next boundary.

    Args:
        are_needed: whether the learner has other ranks.
    """

    def __init__(self, are_needed: bool) -> None:
        self._are_needed = are_needed
        self._promise = _NOTHING
        self._postponed: list[msg.FromSyncer] = []

    def make(self, fragments: Sequence[Fragment]) -> Promise:
        """Promise everything that is possible now."""
        land = tuple(p for p, f in enumerate(fragments) if f.can_land)
        self._promise = Promise(land, tuple(p for p, f in enumerate(fragments) if f.may_snapshot))
        return self._promise

    def allow_landing(self, p: int) -> bool:
        return not self._are_needed or p in self._promise.land

    def allow_snapshot(self, p: int) -> bool:
        return not self._are_needed or p in self._promise.snapshot

    def postpone(self, message: msg.FromSyncer) -> bool:
        """Postpone a message that could break a promise until after the boundary (rule 2); returns whether it did."""
        if not self._promise.land or not isinstance(message, msg.FateIs | msg.Welcome):
            return False
        self._postponed.append(message)
        return True

    def end_boundary(self) -> list[msg.FromSyncer]:
        """Drop the fulfilled promise; return the postponed messages."""
        postponed, self._postponed, self._promise = self._postponed, [], _NOTHING
        return postponed
