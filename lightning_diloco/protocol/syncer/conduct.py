"""Quarantine of learners that send odd contributions, and their release.

1. STRIKES odd contributions in a row, over all fragments, put a learner in quarantine. Whether one is odd is found by
   `syncer/judging.py`. It also is if the last NUM_LIKENESSES of this learner go against the others' (a mean likeness
   below AWAY, theirs being above 0), or nowhere where others clearly agree (below NOWHERE times theirs, which is above
   CLEAR). Honest learners that are ten times slower, late, or far behind stay above 0, give or take 0.05; one that has
   other classes of data than the rest was seen at -0.25. That is what guard="norm" is for.
2. Nobody waits for a learner in quarantine, or counts it among those at work. Its contributions are compared with the
   others' and refused, with the reason; it adopts the anchor after each, and so gets rid of what made them odd.
3. RELEASE_AFTER contributions in a row with nothing odd release it, if the last NUM_LIKENESSES go the others' way
   (NEAR times their likeness, or more). Left alone it stays: there is nobody to tell.
4. It takes the word of two other learners to call a contribution odd, or sound. Only learners that take part now are
   asked, and most of them stay out of quarantine: of two halves, nobody can tell which one is broken. Where data differ
   between learners, contributions point away from each other once the anchor is good for all of them.
5. It is the learner id that is in quarantine, restarts of its process and of the syncer notwithstanding. What counts in
   a row begins anew when the syncer is started again.

Source: our choice; bounds are from `tests/bench/broken_learner.py`.
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
    """What is remembered of the contributions of each learner.

    Args:
        roster: who takes part; holds who is in quarantine.
        guard: of the run; "norm": where contributions point to is not held against anybody.
    """

    def __init__(self, roster: Roster, *, guard: Guard) -> None:
        self._roster = roster
        self._guard = guard
        self._num_odd: Counter[str] = Counter()
        self._num_sound: Counter[str] = Counter()
        self._likenesses: dict[str, deque[float]] = {}

    def hear(self, member: Member, verdict: Verdict) -> records.Quarantined | records.Released | None:
        """Take a verdict on a contribution of this learner; returns what is to be recorded because of it."""
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
        if odd is not None and self._num_odd[name] >= STRIKES and self._is_alone(name):
            return records.Quarantined(name, f"{STRIKES} odd contributions in a row, the last one: {odd}")
        if name in self._roster.quarantined and self._num_sound[name] >= RELEASE_AFTER:
            return records.Released(name)
        return None

    def apply(self, record: records.Quarantined | records.Released) -> None:
        """The part that a restart repeats."""
        for counts in (self._num_odd, self._num_sound, self._likenesses):
            counts.pop(record.learner, None)
        if isinstance(record, records.Quarantined):
            self._roster.quarantined[record.learner] = record.reason
        else:
            self._roster.quarantined.pop(record.learner, None)

    def _is_alone(self, name: str) -> bool:
        """Whether it is not in quarantine, and with it most learners would still not be."""
        if name in self._roster.quarantined:
            return False
        num_live = len({member.learner for member in self._roster.live()} | {name})
        return len(self._trusted_others(name)) > num_live / 2

    def _trusted_others(self, name: str) -> set[str]:
        return {member.learner for member in self._roster.trusted()} - {name}

    def _unlike(self, name: str) -> str | None:
        """Whether its last contributions, taken together, do not go where the others' go."""
        found, theirs = self.likeness(name), self._likeness_of_others(name)
        is_away = found is not None and found < AWAY < 0 < theirs
        is_nowhere = found is not None and theirs > CLEAR and found < NOWHERE * theirs
        if self._guard == "norm" or not (is_away or is_nowhere):
            return None
        return (
            f"its last {NUM_LIKENESSES} have a mean cosine of {found:.2f} with those of the others, who have "
            f'{theirs:.2f} among themselves; if that comes from data of another kind, begin runs with guard="norm"'
        )

    def _is_near(self, name: str) -> bool:
        if self._guard == "norm":
            return True
        found = self.likeness(name)
        return found is not None and found >= NEAR * max(0.0, self._likeness_of_others(name))

    def _likeness_of_others(self, name: str) -> float:
        """Of most of them; 0: not known."""
        others = [mean for other in self._trusted_others(name) if (mean := self.likeness(other)) is not None]
        return median_high(others) if len(others) >= 2 else 0.0

    def likeness(self, name: str) -> float | None:
        """Mean over the last contributions of this learner; None: there are too few."""
        found = self._likenesses.get(name, ())
        return fmean(found) if len(found) == NUM_LIKENESSES else None
