"""Pre-emption: after SIGTERM a learner leaves the run, sends its last contributions, writes a checkpoint and ends.

1. Lightning's handler notes the signal and calls our launcher. Lightning raises `SIGTERMException` at the end of the
   present batch. A guard thread ends the process when the grace period is over, even if another thread hangs. Before
   the first step, there is nothing to save. A process that still waits for a syncer, or compiles the first batch, ends
   after UNTRAINED_S.
2. Leaving the run, sending the last contributions and writing the checkpoint share the grace period, less RESERVE_S for
   the rest of the exit. If the signal comes at the end of training, while a learner waits for its last contributions,
   it waits no longer than this. It writes no checkpoint then: one of the last step would leave nothing to train, and
   work that was not merged would be lost. The next process continues from the checkpoint before, and trains it again.
3. The exit code is EXIT_CODE, 128 + SIGTERM as in shells. It marks neither the end of the work nor a failure.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_diloco.errors import DiLoCoError
from lightning_diloco.process.threads import Crew

if TYPE_CHECKING:
    from lightning_diloco.learner.link import Link
    from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer

log = logging.getLogger(__name__)

EXIT_CODE = 143
RESERVE_S = 4.0
UNTRAINED_S = 0.5


class Preemption:
    """Watches for SIGTERM during one fit.

    Args:
        grace_s: seconds from the signal to the end of the process.
        end: ends the process when the grace period is over.

    Attributes:
        has_trained: whether a step has been made.
    """

    def __init__(self, grace_s: float, end: Callable[[int], object] = os._exit) -> None:
        self._grace_s = grace_s
        self._end = end
        self.has_trained = False
        self._noticed_s: float | None = None
        self._noticed, self._is_over = threading.Event(), threading.Event()
        # The handler must not start the thread: this takes locks that the interrupted thread may hold.
        Crew(lambda error: log.error("the guard of the grace period stopped: %s", error)).start(
            "preemption", self._guard
        )

    def notice(self) -> None:
        """Note the signal; its handler calls this."""
        if self._noticed_s is None:
            self._noticed_s = time.monotonic()
            self._noticed.set()

    @property
    def is_noticed(self) -> bool:
        """Whether the signal has come."""
        return self._noticed_s is not None

    @property
    def left_s(self) -> float:
        """Seconds that are left for leaving the run and for the checkpoint."""
        since_s = time.monotonic() - (time.monotonic() if self._noticed_s is None else self._noticed_s)
        return max(0.0, self._grace_s - RESERVE_S - since_s)

    def asked(self) -> float | None:
        """Return `left_s`; None if the signal has not come."""
        return self.left_s if self.is_noticed else None

    def leave_run(self, link: Link, checkpointer: LearnerCheckpointer) -> None:
        """Write a checkpoint while the last contributions are merged."""
        checkpointer.take()
        try:
            link.finish("preempted", self.left_s)
        except DiLoCoError as error:
            log.warning("the run was left without a farewell: %s", error)
        is_stored = checkpointer.wait(self.left_s)
        log.warning("pre-empted; the run was left with%s a checkpoint", "" if is_stored else "out")
        if not link.is_drained:
            log.warning(
                "pre-empted before all of this learner's work was merged; the run has lost the rest: checkpoints "
                "hold no parameters"
            )

    def close(self) -> None:
        """End the guard; after the signal, the guard stays until the process has ended."""
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
