"""SIGTERM asks a learner to go, soon: it says so, sends what it has, writes a checkpoint, and ends in time.

1. Lightning's handler notes the signal, tells our launcher, and raises `SIGTERMException` where the present batch ends.
   From the signal on a guard counts: whatever hangs, the process is gone when the grace is over. Before the first step
   is done there is nothing to save: who waits for a syncer, or compiles the first batch, is gone after UNTRAINED_S.
2. The leave, its last contributions and the checkpoint share the grace, less RESERVE_S for the rest of the way out.
3. The exit code is EXIT_CODE, 128 + SIGTERM as shells have it: neither an end of the work nor a failure.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from lightning_diloco.process.threads import Crew

log = logging.getLogger(__name__)

EXIT_CODE = 143
RESERVE_S = 4.0
UNTRAINED_S = 0.5


class Preemption:
    """Watches for one signal during one fit.

    Args:
        grace_s: from the signal to the end of the process.
        end: how the process is ended when the grace is over.

    Attributes:
        has_trained: whether a step is done.
    """

    def __init__(self, grace_s: float, end: Callable[[int], object] = os._exit) -> None:
        self._grace_s = grace_s
        self._end = end
        self.has_trained = False
        self._noticed_s: float | None = None
        self._noticed, self._is_over = threading.Event(), threading.Event()
        # Not from the handler: starting a thread takes locks that the interrupted thread may hold.
        Crew(lambda error: log.error("nobody guards the grace: %s", error)).start("preemption", self._guard)

    def notice(self) -> None:
        """Called by the signal's handler."""
        if self._noticed_s is None:
            self._noticed_s = time.monotonic()
            self._noticed.set()

    @property
    def is_noticed(self) -> bool:
        """Whether the signal came."""
        return self._noticed_s is not None

    @property
    def left_s(self) -> float:
        """Time for leaving and for the checkpoint."""
        since_s = time.monotonic() - (time.monotonic() if self._noticed_s is None else self._noticed_s)
        return max(0.0, self._grace_s - RESERVE_S - since_s)

    def close(self) -> None:
        """The fit is over. After a signal the guard stays, until the process has ended."""
        if self._noticed_s is None:
            self._is_over.set()
            self._noticed.set()

    def _guard(self) -> None:
        self._noticed.wait()
        if not self._is_over.wait(min(UNTRAINED_S, self._grace_s)) and not self.has_trained:
            log.warning("SIGTERM came before the first step; there is nothing to save, and this process ends")
            self._end(EXIT_CODE)
        if not self._is_over.wait(self._grace_s):
            log.error("SIGTERM came %.0f s ago and this process has not ended; it ends now", self._grace_s)
            self._end(EXIT_CODE)
