"""Decide when a run ends by itself.

1. A syncer that expects N learners ends when N have finished and none is left. In a run that was stopped and then
   continued, learners that finished before the stop do not count.
2. An embedded syncer ends when no learner is left, or when its starter died before any learner took part. While the
   starter lives, lapsed learners count as present, because a suspended laptop or script may continue later.
3. The last learner to leave evaluates the final anchor. The syncer waits while that learner polls, for at most
   EVALUATE_WAIT_S, or EVALUATE_WAITS times the longest validation of this run if that is longer. After a restart, the
   syncer gives the learner BACK_S to reconnect.
4. Any other syncer runs until it is stopped.

Source: our choice.
"""

from __future__ import annotations

import os
import time

from lightning_diloco.protocol.syncer.machine import SyncerState

EVALUATE_WAIT_S, EVALUATE_WAITS = 3600.0, 3.0
LISTENING_S = 10.0  # through a bad network, calls may fail for seconds
BACK_S = 5.0  # within which learners reconnect to a restarted syncer


class RunEnd:
    """Watches for the end of a run.

    Args:
        expect: number of learners that must finish; None: the syncer does not end by itself, unless it is embedded.
        embedded_by: process id of the learner that started this syncer; None: it is not embedded.
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
        """Record that the run was stopped before, not killed (rule 1)."""
        self._counts_from_s = self._began_s

    def contacted(self) -> None:
        """Record a call."""
        self._contact_s = time.monotonic()

    def polled(self, session: str) -> None:
        """Record a poll of this session."""
        self._polled_s[session] = self._contact_s = time.monotonic()

    def stood_still(self) -> None:
        """Treat the last polls as made now, because no learner could call while the process was suspended."""
        self._contact_s = time.monotonic()
        self._polled_s = dict.fromkeys(self._polled_s, self._contact_s)

    def has_come(self, state: SyncerState, now_s: float) -> bool:
        """Return whether the run is over; call this periodically."""
        self._watch_validations(state, now_s)
        if not self._is_deserted(state, now_s):
            self._quiet_since_s = None
            return False
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        last = max(state.roster.in_state("left"), key=lambda m: m.ended_s or 0.0, default=None)
        is_waited_for = last is not None and self._may_speak(last.session, now_s)
        return state.has_verdict or not is_waited_for or now_s - self._quiet_since_s > self._wait_s

    def waits_until_s(self, state: SyncerState, now_s: float) -> float | None:
        """Return when the wait for the last validation ends (rule 3); None if the run does not end after it."""
        if not self._is_deserted(state, now_s):
            return None
        return (now_s if self._quiet_since_s is None else self._quiet_since_s) + self._wait_s

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
