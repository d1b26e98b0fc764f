"""The rules by which either the primary or its standby serves a run.

1. The primary announces a decision when its standby has the record on disk. A takeover therefore loses nothing that a
   learner knows. Records of IN_FLIGHT kinds may be on their way together, and any message waits for all records before
   it. After any other record, the primary decides nothing until the standby has it, because of rule 5.
2. If the standby is silent for ALONE_S, the primary may continue without it, but only if at least half of the learners
   have talked to it without a pause of more than PAUSE_S since BEFORE_S before the standby was last heard. Otherwise it
   waits, because the learners may follow the standby. A restarted primary does not know how many do; it waits, or a
   person decides.
3. A learner without an answer from one syncer for ASK_AFTER_S asks the other one.
4. The standby may take over if the primary is silent for QUIET_S and more than half of the learners have asked it
   within ASKED_S. If it was without the primary for FRESH_S, it may not, because the primary may have continued without
   it. Then a person decides.
5. Rules 2 and 4 exclude each other. A standby that takes over was in step with the primary less than FRESH_S before,
   and more than half of the learners have just asked it. Each of them had paused at the primary for ASK_AFTER_S. This
   was later than BEFORE_S before the standby was in step, because a call takes at most CALL_S and counts for ASKED_S.
   So these learners do not count for the primary, neither then nor later. The primary needs at least half of the fleet,
   and the standby more than half; both cannot be true. Also, FRESH_S ends before ALONE_S.
   Both must count the same fleet. The standby counts the learners that its log has. The primary's log may be ahead by
   one record that changes the fleet, because only one is on its way at a time, and the primary's machine may be ahead
   of its log. So the primary's condition must hold for every fleet in between.
6. The rules compare times on one machine only. They assume that clocks run at the same rate, and that a process is not
   suspended between its decision and the next call. If these assumptions fail, both syncers may serve. Then learners
   prove the versions that they know, and a new generation begins (`machine.py`).

Source: our choice; the paper does not say what happens if the syncer fails.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.syncer import records

PAUSE_S = 2.5
ASK_AFTER_S = 5.0
ASKED_S = 5.0
CALL_S = 10.0  # longest time from sending a call to its arrival or failure
BEFORE_S = CALL_S + ASKED_S
ALONE_S = ASK_AFTER_S + CALL_S + ASKED_S + 1.0
QUIET_S = 3.0
FRESH_S = ALONE_S - 3.0
MAX_SESSIONS = 4096

IN_FLIGHT = frozenset(
    kind.__name__
    for kind in (
        records.CommitRecord, records.Decided, records.RangesLeased, records.RangesSettled, records.SourceEnded,
    )
)  # fmt: skip
"""Kinds of records that do not change who takes part."""

_CHANGES = frozenset(kind.__name__ for kind in (records.Activated, records.Returned, records.Lapsed, records.Departed))


def changed_by(record: Json) -> set[str]:
    """Return the session that a record, as in the log, adds to the fleet or removes from it."""
    return {str(record["session"])} if record["kind"] in _CHANGES else set()


@dataclass(frozen=True, slots=True)
class Fleets:
    """The fleets that a standby may count, by its copy of the log.

    Args:
        certain: sessions that are in all of them.
        possible: sessions that are in at least one of them.
    """

    certain: frozenset[str] = frozenset()
    possible: frozenset[str] = frozenset()

    @classmethod
    def only(cls, fleet: Collection[str]) -> Fleets:
        """Return this fleet and no other one."""
        return cls(frozenset(fleet), frozenset(fleet))

    def or_(self, fleet: Collection[str], changed: Collection[str] = ()) -> Fleets:
        """Return these fleets and this one, with and without each of the sessions that have changed on the way."""
        return Fleets((self.certain & frozenset(fleet)) - frozenset(changed), self.possible.union(fleet, changed))


class Primary:
    """The primary's view of its learners and its standby.

    Args:
        now_s: current time. The standby counts as heard then.
    """

    def __init__(self, now_s: float) -> None:
        self._standby_s = now_s
        self._stretches: dict[str, tuple[float, float]] = {}  # by session: start and end of its calls without a pause

    def heard(self, session: str, now_s: float) -> None:
        """Record an answered call of a learner."""
        since_s, until_s = self._stretches.pop(session, (now_s, now_s))
        if len(self._stretches) >= MAX_SESSIONS:
            del self._stretches[next(iter(self._stretches))]  # the one that was silent for longest
        self._stretches[session] = (since_s if now_s - until_s <= PAUSE_S else now_s, now_s)

    def heard_standby(self, now_s: float) -> None:
        """Record a call of the standby."""
        self._standby_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Return how long the standby has been silent."""
        return now_s - self._standby_s

    def may_continue_alone(self, fleets: Fleets, now_s: float) -> bool:
        """Return whether decisions may be announced without the standby (rule 2), whichever fleet it counts."""
        steady = {
            session
            for session in fleets.possible
            if (stretch := self._stretches.get(session)) is not None
            and now_s - stretch[1] <= PAUSE_S
            and stretch[0] <= self._standby_s - BEFORE_S
        }
        # The worst possible fleet has as few steady learners, and as many others, as possible.
        num_steady = len(fleets.certain & steady)
        num_others = len(fleets.possible - steady)
        return self.silent_s(now_s) >= ALONE_S and num_steady >= num_others


class Standby:
    """The standby's view of the primary and of the learners that ask it."""

    def __init__(self) -> None:
        self._sent_s = self._answered_s = -math.inf
        self._asked_s: dict[str, float] = {}

    def answered(self, sent_s: float, now_s: float) -> None:
        """Record that the primary has answered a call that was sent at `sent_s`."""
        self._sent_s, self._answered_s = sent_s, now_s

    def asked(self, session: str, now_s: float) -> None:
        """Record a call of a learner."""
        self._asked_s.pop(session, None)
        if len(self._asked_s) >= MAX_SESSIONS:
            del self._asked_s[next(iter(self._asked_s))]
        self._asked_s[session] = now_s

    def is_fresh(self, now_s: float) -> bool:
        """Return whether the primary cannot have continued alone yet."""
        return now_s - self._sent_s < FRESH_S

    def may_take_over(self, learners: Collection[str], now_s: float) -> bool:
        """Return whether this standby may become the primary (rule 4).

        Args:
            learners: sessions of all learners that take part.
            now_s: current time.
        """
        is_quiet = now_s - self._answered_s >= QUIET_S
        num_asking = sum(now_s - self._asked_s.get(session, -math.inf) <= ASKED_S for session in learners)
        return is_quiet and self.is_fresh(now_s) and 2 * num_asking > len(learners)
