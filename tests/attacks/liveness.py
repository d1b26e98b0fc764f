"""Faults that make the syncer unresponsive or slow."""

from __future__ import annotations

import os
import signal
import threading


def freeze(pid: int, for_s: float) -> None:
    """Suspend a process for this time."""
    os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(for_s)
    finally:
        os.kill(pid, signal.SIGCONT)


class StuckDisk:
    """A fault hook of the disk: while `is_stuck` is set, each write blocks."""

    def __init__(self) -> None:
        self._works = threading.Event()
        self._works.set()
        self.is_waited_for = threading.Event()

    def __call__(self, point: str) -> None:
        if not self._works.is_set():
            self.is_waited_for.set()
            self._works.wait()

    def get_stuck(self) -> None:
        self._works.clear()

    def work(self) -> None:
        self._works.set()
