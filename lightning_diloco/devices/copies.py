"""Copies that may be made a little later, by whichever thread gets to them first.

1. One thread promises copies, and changes what is to be copied only after it has settled them.
2. Any thread may settle: it makes what nobody has begun, and waits for what another one has begun. So nobody ever waits
   for a thread that only might begin.
3. What a copy raises, everybody who settles from then on gets.

Source: our choice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

Copy = Callable[[], object]


class Copies:
    """The copies of one learner."""

    def __init__(self) -> None:
        self._left: deque[Copy] = deque()  # nobody has begun them
        self._num_unmade = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def promise(self, copies: Sequence[Copy]) -> None:
        """These are to be made; whoever settles makes them in this order."""
        with self._changed:
            self._num_unmade += len(copies)
        self._left.extend(copies)

    def settle(self) -> None:
        """All that was promised before this call is made when it returns.

        Raises:
            BaseException: what a copy raised, now or before, here or in another thread.
        """
        while self._left:
            try:
                copy = self._left.popleft()
            except IndexError:  # another thread was faster
                break
            self._make(copy)
        if self._num_unmade:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_unmade)
        if self._error is not None:
            raise self._error

    def _make(self, copy: Copy) -> None:
        try:
            copy()
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._num_unmade -= 1
                self._changed.notify_all()
