"""Turns Ctrl-C, SIGTERM and a closed terminal into flags.

1. An exception from a signal handler could be raised between the start of a child and its registration. A flag that the
   main loop checks cannot.
2. The first signal requests a clean shutdown, the second one an immediate end. Signals within SAME_S count as one,
   because `timeout` and some shells send a signal to a process and again to its group.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from lightning_diloco.config import LearnerConfig

GRACE_S = LearnerConfig().preemption_s + 5.0  # learners exit before that
CTRL_C_GRACE_S = 3.5  # a user is waiting; 5 s together with the syncer's shutdown
SAME_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Records termination signals while entered. Use it in the main thread only.

    Args:
        clock: seconds.

    Attributes:
        signal: the first signal; None if there was none.
        is_urgent: whether a second signal came.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted_s = 0.0
        self.signal: signal.Signals | None = None
        self.is_urgent = False

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect for this signal, such as 130 for Ctrl-C."""
        return 128 + (self.signal or 0)

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Interruption:
        # Under nohup, a closed terminal is ignored.
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
