"""Turns Ctrl-C, SIGTERM and a closed terminal into a flag.

An exception raised from a signal handler could fall between the start of a child and its entry in the books; a flag
that the one loop looks at cannot.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """While entered, signals that ask to end are only noted; main thread only."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

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
        self.signal = self.signal or signal.Signals(number)
