"""Crash points of a simulated syncer: before each of its actions, and between the steps of a commit.

1. A point is (name, n). It is hit when the name is reached for the nth time since the last crash.
2. Points are used in order, each once. Only the first remaining one is active.
3. An empty name matches every point, so that a test can crash a history at each of its boundaries in turn.

Names are those of the actions ("Send Welcome", "Record Granted", "Merge", ...). A commit has "append" and then "tell".
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from lightning_diloco.protocol import actions as do


class Killed(Exception):  # noqa: N818  not an error of the code under test
    """A simulated kill -9."""


class CrashPoints:
    """Raises `Killed` at the given points.

    Args:
        points: (name, nth) in the order of the crashes.

    Attributes:
        reached: how often each name was reached, over all restarts.
        hit: names of the points hit so far.
    """

    def __init__(self, points: Iterable[tuple[str, int]] = ()) -> None:
        self._left = deque(points)
        self._count = 0
        self.reached: Counter[str] = Counter()
        self.hit: list[str] = []

    def arm(self, name: str, nth: int) -> None:
        """Add a point after the remaining ones."""
        self._left.append((name, nth))

    def before(self, action: do.SyncerAction) -> None:
        """Reach the crash point before this action."""
        match action:
            case do.Send():
                self.reach(f"Send {type(action.message).__name__}")
            case do.Record():
                self.reach(f"Record {action.values['kind']}")
            case _:
                self.reach(type(action).__name__)

    def reach(self, name: str) -> None:
        """Reach a point; raises `Killed` if the syncer crashes there."""
        self.reached[name] += 1
        if not self._left or self._left[0][0] not in ("", name):
            return
        self._count += 1
        if self._count == self._left[0][1]:
            self._left.popleft()
            self._count = 0
            self.hit.append(name)
            raise Killed(name)
