"""Quarantine of learners that send odd contributions, and their release.

1. A learner is in quarantine after STRIKES odd contributions in a row, over all fragments. `syncer/judging.py` finds
   odd contributions, and computes likenesses: median cosines with the other contributions of a round. A contribution is
   also odd if the mean likeness of the learner's last NUM_LIKENESSES is below AWAY while that of the others is above 0,
   or below NOWHERE times that of the others while theirs is above CLEAR. In measurements, honest learners that were ten
   times slower, or late, had at least -0.05. A learner with other classes of data had -0.25; such runs need
   guard="norm".
2. Rounds do not wait for a learner in quarantine, and it has no share of the fleet's work. Its contributions are
   compared with the others' and refused with a reason. After each it adopts the anchor, which removes broken values.
3. RELEASE_AFTER sound contributions in a row end the quarantine, if the mean likeness is at least NEAR times that of
   the others. A learner that trains alone stays in quarantine, because there is nothing to compare it with.
4. At least two other learners are needed to call a contribution odd or sound. Only learners that are live and not in
   quarantine are compared with. More than half of the live learners always stay out of quarantine, because the syncer
   cannot tell which of two halves is broken. If learners have different data, their contributions point apart once the
   anchor is good for all of them.
5. Quarantine belongs to the learner id, and survives restarts of the learner and of the syncer. A restart of the syncer
   resets the counts of contributions in a row.

Source: our choice; the limits are measured by `tests/bench/broken_learner.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from statistics import fmean, median_high

from lightning_diloco.config import Guard
from lightning_diloco.protocol.events import Verdict
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.roster import Member, Roster

STRIKES = 3
RELEASE_AFTER = 8
NUM_LIKENESSES = 8
AWAY = -0.1
NOWHERE, CLEAR = 0.05, 0.2
NEAR = 0.25


class Conduct:
    """Counts odd and sound contributions of each learner.

    Args:
        roster: sessions of the run; holds the quarantined learner ids.
        guard: option of the run; "norm" ignores the direction of contributions.
    """

    def __init__(self, roster: Roster, *, guard: Guard) -> None:
        self._roster = roster
        self._guard = guard
        self._num_odd: Counter[str] = Counter()
        self._num_sound: Counter[str] = Counter()
        self._likenesses: dict[str, deque[float]] = {}

    def hear(self, member: Member, verdict: Verdict) -> records.Quarantined | records.Released | None:
        """Process a verdict on a contribution; return the record of a quarantine or release that follows from it."""
        name = member.learner
        if verdict.likeness is not None:
            self._likenesses.setdefault(name, deque(maxlen=NUM_LIKENESSES)).append(verdict.likeness)
        odd = verdict.odd or self._unlike(name)
        if odd is not None:
            self._num_odd[name] += 1
            self._num_sound[name] = 0
        elif verdict.is_telling:
            self._num_odd[name] = 0
            self._num_sound[name] = self._num_sound[name] + 1 if self._is_near(name) else 0
        if odd is not None and self._num_odd[name] >= STRIKES and self._may_be_quarantined(name):
            return records.Quarantined(name, f"{STRIKES} odd contributions in a row, the last one: {odd}")
        if name in self._roster.quarantined and self._num_sound[name] >= RELEASE_AFTER:
            return records.Released(name)
        return None

    def apply(self, record: records.Quarantined | records.Released) -> None:
        """Apply a record; a restart does the same."""
        for counts in (self._num_odd, self._num_sound, self._likenesses):
            counts.pop(record.learner, None)
        if isinstance(record, records.Quarantined):
            self._roster.quarantined[record.learner] = record.reason
        else:
            self._roster.quarantined.pop(record.learner, None)

    def _may_be_quarantined(self, name: str) -> bool:
        """Return whether a learner may be quarantined, because more than half of the live ones would stay out of it."""
        if name in self._roster.quarantined:
            return False
        num_live = len({member.learner for member in self._roster.live()} | {name})
        return len(self._trusted_others(name)) > num_live / 2

    def _trusted_others(self, name: str) -> set[str]:
        return {member.learner for member in self._roster.trusted()} - {name}

    def _unlike(self, name: str) -> str | None:
        """Return how a learner's last contributions differ in direction from the others'; None if they do not."""
        found, theirs = self.likeness(name), self._likeness_of_others(name)
        is_away = found is not None and found < AWAY < 0 < theirs
        is_nowhere = found is not None and theirs > CLEAR and found < NOWHERE * theirs
        if self._guard == "norm" or not (is_away or is_nowhere):
            return None
        return (
            f"its last {NUM_LIKENESSES} have a mean cosine of {found:.2f} with those of the others, which have "
            f'{theirs:.2f} with each other; if its data is of another kind, start runs with guard="norm"'
        )

    def _is_near(self, name: str) -> bool:
        if self._guard == "norm":
            return True
        found = self.likeness(name)
        return found is not None and found >= NEAR * max(0.0, self._likeness_of_others(name))

    def _likeness_of_others(self, name: str) -> float:
        """Return the median likeness of the other trusted learners; 0 if it is not known."""
        others = [mean for other in self._trusted_others(name) if (mean := self.likeness(other)) is not None]
        return median_high(others) if len(others) >= 2 else 0.0

    def likeness(self, name: str) -> float | None:
        """Return the mean likeness of a learner's last contributions; None if there are too few."""
        found = self._likenesses.get(name, ())
        return fmean(found) if len(found) == NUM_LIKENESSES else None
