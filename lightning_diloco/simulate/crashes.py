"""Where a simulated syncer dies: before any of its actions, and between the steps of a commit.

1. A point is a name and a number: it is hit when the name is reached for the nth time since the last death.
2. Points are ordered and single-use: only the first one that is left counts, and a hit uses it up.
3. An empty name stands for every point, so that a whole history can be walked through one boundary at a time.

Names are the actions' ("Send Welcome", "Record Granted", "Merge", ...); a commit is "append", then "tell".
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from lightning_diloco.protocol import actions as do


class Killed(Exception):  # noqa: N818  it is no error of ours
    """kill -9."""


class CrashPoints:
    """Raises `Killed` at the given points.

    Args:
        points: (name, nth) in the order in which they are to be hit.

    Attributes:
        reached: how often each name was reached, over all lives.
        hit: the names hit so far.
    """

    def __init__(self, points: Iterable[tuple[str, int]] = ()) -> None:
        self._left = deque(points)
        self._count = 0
        self.reached: Counter[str] = Counter()
        self.hit: list[str] = []

    def arm(self, name: str, nth: int) -> None:
        """One more point, after those that are left."""
        self._left.append((name, nth))

    def before(self, action: do.SyncerAction) -> None:
        """An action is about to be carried out."""
        match action:
            case do.Send():
                self.reach(f"Send {type(action.message).__name__}")
            case do.Record():
                self.reach(f"Record {action.values['kind']}")
            case _:
                self.reach(type(action).__name__)

    def reach(self, name: str) -> None:
        """This far the syncer has come; raises `Killed` if no further."""
        self.reached[name] += 1
        if not self._left or self._left[0][0] not in ("", name):
            return
        self._count += 1
        if self._count == self._left[0][1]:
            self._left.popleft()
            self._count = 0
            self.hit.append(name)
            raise Killed(name)
