"""When a run is over by itself: its fleet has gone, and the last one to leave has spoken.

1. A syncer that expects N learners ends when as many have finished and nobody is left. In a run that had been stopped
   or had ended, and was opened again to go on, those that finished before do not count.
2. An embedded one ends when nobody is left; or when its starter died before anybody took part. While its starter lives,
   who has only lapsed counts as there: a suspended laptop, or a script behind Ctrl-Z, goes on later.
3. The last leaver evaluates the final anchor. It is waited for as long as it listens, up to EVALUATE_WAIT_S, or
   three times the longest validation of this run. A syncer that was started again meanwhile gives it time to come back.
4. Any other syncer serves until it is told to stop.
5. A learner that is started again beside the run directory may find a summary instead of a syncer.

Source: our choice.
"""

from __future__ import annotations

import os
import time

from lightning_diloco.protocol.syncer.machine import SyncerState

EVALUATE_WAIT_S, EVALUATE_WAITS = 3600.0, 3.0
LISTENING_S = 3.0
BACK_S = 5.0  # within which learners find a syncer that was started again


class RunEnd:
    """Watches for the end.

    Args:
        expect: learners that have to finish.
        embedded_by: process id of the learner that started this process; None: nobody did.
    """

    def __init__(self, *, expect: int | None, embedded_by: int | None) -> None:
        self._expect = expect
        self._embedded_by = embedded_by
        self._began_s = self._contact_s = time.monotonic()
        self._polled_s: dict[str, float] = {}
        self._quiet_since_s: float | None = None
        self._validating_since_s: dict[str, float] = {}
        self._wait_s = EVALUATE_WAIT_S
        self._counts_from_s = float("-inf")

    def reopened(self) -> None:
        """The run had been closed, and not only its syncer killed."""
        self._counts_from_s = self._began_s

    def contacted(self) -> None:
        """Somebody called."""
        self._contact_s = time.monotonic()

    def polled(self, session: str) -> None:
        """This session listens."""
        self._polled_s[session] = self._contact_s = time.monotonic()

    def stood_still(self) -> None:
        """Nobody could call: whoever listened a moment before counts as listening now."""
        self._contact_s = time.monotonic()
        self._polled_s = dict.fromkeys(self._polled_s, self._contact_s)

    def has_come(self, state: SyncerState, now_s: float) -> bool:
        """Whether the run is over; to be asked from time to time."""
        self._watch_validations(state, now_s)
        if not self._is_deserted(state, now_s):
            self._quiet_since_s = None
            return False
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        last = max(state.roster.in_state("left"), key=lambda m: m.ended_s or 0.0, default=None)
        is_waited_for = last is not None and self._may_speak(last.session, now_s)
        return state.has_verdict or not is_waited_for or now_s - self._quiet_since_s > self._wait_s

    def _watch_validations(self, state: SyncerState, now_s: float) -> None:
        validating = {m.session for m in state.roster.in_state("active") if m.is_live and m.phase == "evaluating"}
        self._validating_since_s = {s: self._validating_since_s.get(s, now_s) for s in validating}
        for since_s in self._validating_since_s.values():
            self._wait_s = max(self._wait_s, EVALUATE_WAITS * (now_s - since_s))

    def _may_speak(self, session: str, now_s: float) -> bool:
        if session in self._polled_s:
            return now_s - self._polled_s[session] < LISTENING_S
        return now_s - self._began_s < BACK_S

    def _is_deserted(self, state: SyncerState, now_s: float) -> bool:
        if self._embedded_by is not None:
            if os.getppid() == self._embedded_by:
                return state.is_finished and not state.roster.in_state("active")
            is_forgotten = now_s - self._contact_s > state.config.lease_s
            return state.is_finished or (is_forgotten and not state.roster.in_state("active", "left"))
        if self._expect is None:
            return False
        finished = [m for m in state.roster.in_state("left") if m.ending == "finished"]
        here = {m.learner for m in finished if m.ended_s is None or m.ended_s >= self._counts_from_s}
        return state.is_finished and len(here) >= self._expect
