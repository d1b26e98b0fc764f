"""One run as it is watched: the latest answer of its syncer, or its silence, its end, and how it came there.

1. The last answer is kept when the syncer falls silent; the page shows it as old, not as the truth.
2. A run that ended has a summary. What has neither a summary nor an answer is broken, and is called so.
3. Safe to use from several threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_diloco.live.history import Curves, Events
from lightning_diloco.runtime.progress import EVENT as PROGRESS
from lightning_diloco.runtime.tape import read_tape
from lightning_diloco.transport.base import Json

_SILENT = "the syncer does not answer"


class Watch:
    """What is known of a run.

    Args:
        name: for people, until the syncer tells its own.
        clock: unix seconds.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._clock = clock
        self._mutex = threading.Lock()
        self._curves, self._events = Curves(), Events()
        self._status: Mapping[str, Any] | None = None
        self._answered = 0.0
        self._problem: str | None = None
        self._summary: Mapping[str, Any] | None = None

    def read_past(self, run_dir: Path) -> None:
        """Take what the tape of a run directory has, if there is one."""
        path = run_dir / "tape" / "events.jsonl"
        if not path.is_file():
            return
        with self._mutex:
            for line in read_tape(path):
                if line["event"] == PROGRESS:
                    self._curves.add(line["t"], line)
                self._events.add([line])

    def saw(self, status: Mapping[str, Any] | None, problem: str | None = None) -> None:
        """Take an answer of the syncer; without one, what is wrong with it."""
        with self._mutex:
            if status is None:
                self._problem = problem or _SILENT
                return
            self._problem = problem
            if status is self._status:
                return
            self._status, self._answered = status, self._clock()
            self._events.add(status["recent"])
            if status["learners"]:
                self._curves.add(self._answered, status)

    def said(self, text: str) -> None:
        """Take what was said about the run's processes."""
        with self._mutex:
            self._events.say(self._clock(), text)

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Take the end of the run."""
        with self._mutex:
            self._summary = summary

    @property
    def status(self) -> Mapping[str, Any] | None:
        """The latest answer; None while the syncer does not answer."""
        with self._mutex:
            return None if self._problem or self._summary else self._status

    def state(self) -> Json:
        """All that the page shows."""
        with self._mutex:
            told = self._status or self._summary or {}
            return {
                "run": told.get("run", self._name),
                "now": self._clock(),
                "answered": self._answered or None,
                "problem": self._problem,
                "status": self._status,
                "summary": self._summary,
                "rows": list(self._curves.rows),
                "events": list(self._events.latest),
            }
