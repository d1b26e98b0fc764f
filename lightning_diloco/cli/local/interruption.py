"""Turns Ctrl-C, SIGTERM and a closed terminal into flags.

1. An exception raised from a signal handler could fall between the start of a child and its entry in the books; a flag
   that the one loop looks at cannot.
2. The first signal asks to end in good order, the next one to end at once. What comes within SAME_S is the same one:
   `timeout` and some shells send it to a process and to its group.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from lightning_diloco.config import LearnerConfig

GRACE_S = LearnerConfig().preemption_s + 5.0  # learners end themselves before
CTRL_C_GRACE_S = 3.5  # somebody sits there and waits: with what the syncer needs to end, 5 s
SAME_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """While entered, signals that ask to end are only noted; main thread only.

    Args:
        clock: seconds.

    Attributes:
        signal: the first one; None: there was none.
        is_urgent: whether there was another.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted_s = 0.0
        self.signal: signal.Signals | None = None
        self.is_urgent = False

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process ended by that signal: 130 for Ctrl-C."""
        return 128 + (self.signal or 0)

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Interruption:
        # nohup asks for a closed terminal to mean nothing, and gets it.
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        noted = [number for number in _SIGNALS if number != signal.SIGHUP or not is_nohup]
        self._before = {number: signal.signal(number, self._note) for number in noted}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted_s = signal.Signals(number), self._clock()
        elif self._clock() - self._noted_s > SAME_S:
            self.is_urgent = True
