"""The watched state of one run: the syncer's latest answer, its problem or summary, and the run's history.

1. If the syncer stops answering, the last answer is kept and the page marks it as old.
2. A finished run has a summary. A run with neither a summary nor an answer is reported as broken.
3. `Watch` is thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_diloco.live.history import Curves, Events
from lightning_diloco.storage.tape import TAPE, read_tape
from lightning_diloco.syncer.status.progress import EVENT as PROGRESS
from lightning_diloco.transport.base import Json

_SILENT = "the syncer does not answer"


class Watch:
    """The watched state of a run.

    Args:
        name: displayed name until the syncer reports the run's id.
        clock: returns the time in unix seconds.
        places: returns where each process is; empty if nothing places them.
    """

    def __init__(
        self,
        name: str,
        *,
        clock: Callable[[], float] = time.time,
        places: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._name = name
        self._clock, self._places = clock, places
        self._mutex = threading.Lock()
        self._curves, self._events = Curves(), Events()
        self._status: Mapping[str, Any] | None = None
        self._answered = 0.0
        self._problem: str | None = None
        self._summary: Mapping[str, Any] | None = None

    def read_past(self, run_dir: Path) -> None:
        """Read the history from the tape of a run directory, if there is one."""
        with self._mutex:
            for line in read_tape(run_dir / TAPE):
                if line["event"] == PROGRESS:
                    self._curves.add(line["t"], line)
                self._events.add([line])

    def saw(self, status: Mapping[str, Any] | None, problem: str | None = None) -> None:
        """Record an answer of the syncer, or None and the problem."""
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
        """Record a message about the run's processes."""
        with self._mutex:
            self._events.say(self._clock(), text)

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Record the end of the run."""
        with self._mutex:
            self._summary = summary

    @property
    def status(self) -> Mapping[str, Any] | None:
        """Return the latest answer; None if the syncer does not answer or the run has ended."""
        with self._mutex:
            return None if self._problem or self._summary else self._status

    def state(self) -> Json:
        """Return the data of the page."""
        places = self._places()  # it may wait for a disk
        with self._mutex:
            told = self._status or self._summary or {}
            return {
                "run": told.get("run", self._name),
                "now": self._clock(),
                "answered": self._answered or None,
                "problem": self._problem,
                "status": self._status,
                "summary": self._summary,
                "places": places,
                "rows": list(self._curves.rows),
                "events": list(self._events.latest),
            }
