"""What the ranks of one learner do together at the next step boundary.

One rank holds the machine, the others learn of a landing or snapshot while the step computes. So it is promised when
the step begins, and done when it ends; what comes in between waits for the boundary after.

1. Without other ranks there is nothing to promise: everything may be done at every boundary.
2. A promised landing is made whatever happens meanwhile: what would take the staged update away is heard afterwards.
3. A promised snapshot may be left out by the rank with the machine: the copies of the others are then thrown away.

Source: our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.actions import Promise
from lightning_diloco.protocol.learner.fragment import Fragment

_NOTHING = Promise((), ())


class Promises:
    """The promise for the boundary to come.

    Args:
        are_needed: whether there are other ranks.
    """

    def __init__(self, are_needed: bool) -> None:
        self._are_needed = are_needed
        self._promise = _NOTHING
        self._postponed: list[msg.FromSyncer] = []

    def make(self, fragments: Sequence[Fragment]) -> Promise:
        """Promise all that could be done now."""
        land = tuple(p for p, f in enumerate(fragments) if f.can_land)
        self._promise = Promise(land, tuple(p for p, f in enumerate(fragments) if f.may_snapshot))
        return self._promise

    def allow_landing(self, p: int) -> bool:
        return not self._are_needed or p in self._promise.land

    def allow_snapshot(self, p: int) -> bool:
        return not self._are_needed or p in self._promise.snapshot

    def postpone(self, message: msg.FromSyncer) -> bool:
        """Whether this message must wait, because it could break a promise (rule 2); it is then kept."""
        if not self._promise.land or not isinstance(message, msg.FateIs | msg.Welcome):
            return False
        self._postponed.append(message)
        return True

    def kept(self) -> list[msg.FromSyncer]:
        """The boundary is over; returns what waited for that."""
        postponed, self._postponed, self._promise = self._postponed, [], _NOTHING
        return postponed
