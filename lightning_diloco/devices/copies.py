"""Deferred copies that any thread can run.

1. One thread schedules copies with `promise` and calls `settle` before it changes their sources.
2. Any thread may call `settle`. It runs the copies that have not started and waits for the copies that another thread
   has started, so no thread waits for work that has not begun. It also runs copies that are scheduled while it waits,
   because after the last step the scheduling thread does not call `settle` again.
3. If a copy raises, every later `settle` raises the same error.

Source: our choice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

Copy = Callable[[], object]


class Copies:
    """The deferred copies of one learner."""

    def __init__(self) -> None:
        self._left: deque[Copy] = deque()  # not started yet
        self._num_unmade = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def promise(self, copies: Sequence[Copy]) -> None:
        """Schedule copies; they start in this order."""
        with self._changed:
            self._num_unmade += len(copies)
            self._left.extend(copies)
            self._changed.notify_all()  # a thread that waits for earlier copies runs these, too

    def settle(self) -> None:
        """Finish all copies.

        Raises:
            BaseException: the first error that any copy has raised, in any thread.
        """
        while self._num_unmade:
            try:
                copy = self._left.popleft()
            except IndexError:  # other threads have started all of them
                with self._changed:
                    self._changed.wait_for(lambda: self._left or not self._num_unmade)
            else:
                self._make(copy)
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
