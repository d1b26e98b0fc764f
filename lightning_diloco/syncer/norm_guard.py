"""The norm guard: usual norms of contributions, and the limits for each new contribution.

1. The usual norm of one learner is the median over its last contributions that were merged without scaling. A learner
   is compared with the median of the others' usual norms, so a few broken learners do not move its limit.
2. Others are used if they have MIN_SAMPLES in the fragment. If fewer than two others have MIN_SAMPLES, and the learner
   itself does not have them either, all others are used, together with their contributions to the same round.
3. If at least two others are used, a contribution longer than SCALE_DOWN times the usual norm is scaled down, and a
   contribution longer than NORM_GUARD times the usual norm is refused. If one other is used, a contribution is scaled
   down to NORM_GUARD times the usual norm and never refused, because either of the two learners may be broken. A
   learner may stay longer than the others, for example because of a higher learning rate: its own usual norm is used if
   it is larger, up to NORM_GUARD times the others'.
4. Without others, the limit is NORM_GUARD times the median of all recent norms of the learner, once it has MIN_SAMPLES.
   Norms of zero do not count: parameters that were frozen may move, and their first movement may be a single step.
5. Norms are compared for the same number of steps. Steps in one direction add up linearly, independent steps by the
   square root. The guard uses the larger of the two. Twice the steps therefore allow twice the norm, half the steps 0.7
   times.
6. Norms shrink when the learning rate decays or a learner converges. A learner's usual norm counts as at least FLOOR of
   the largest usual norm that it had per step. Otherwise the guard would repeatedly cut work from before the decay,
   which arrives late because of an outage, to almost nothing.
7. After a restart the norms are read from the tape. A replay does not need them, because recorded commits have their
   limits.

Source: our choice.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high

NORM_GUARD, SCALE_DOWN = 10.0, 4.0
MIN_SAMPLES = 8
NUM_RECENT = 16  # of each learner and fragment
FLOOR = 0.01

Sample = tuple[float, int]  # norm, steps


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits for the norm of one contribution.

    Args:
        norm: a longer contribution is scaled down to this; infinite: no limit.
        refused: a longer contribution is refused.
        usual: the others' usual norm for the same number of steps; 0: there are no others.
        num_others: number of other learners used.
    """

    norm: float = math.inf
    refused: float = math.inf
    usual: float = 0.0
    num_others: int = 0


class _Recent:
    """The last norms of one learner in one fragment: all, and those merged without scaling.

    Attributes:
        peak: largest usual norm per step so far.
    """

    def __init__(self) -> None:
        self.all: deque[Sample] = deque(maxlen=NUM_RECENT)
        self.whole: deque[Sample] = deque(maxlen=NUM_RECENT)
        self.peak = 0.0

    def learn(self, norm: float, steps: int, *, is_whole: bool) -> None:
        if norm == 0:
            return
        self.all.append((norm, steps))
        if is_whole:
            self.whole.append((norm, steps))
            if len(self.whole) >= MIN_SAMPLES:
                self.peak = max(self.peak, median(norm / steps for norm, steps in self.whole))


class NormGuard:
    """Usual norms of one run, per fragment and learner."""

    def __init__(self) -> None:
        self._recent: dict[int, dict[str, _Recent]] = defaultdict(lambda: defaultdict(_Recent))

    def learn(
        self, p: int, learners: Sequence[str], norms: Sequence[float], steps: Sequence[int], kept: Sequence[float]
    ) -> None:
        """Record the norms of committed contributions, before scaling by `kept`."""
        for learner, norm, num_steps, part in zip(learners, norms, steps, kept, strict=True):
            self._recent[p][learner].learn(norm, num_steps, is_whole=part == 1)

    def limit(self, p: int, learner: str, steps: int, present: Mapping[str, Sample]) -> Limit:
        """Return the limits for a contribution.

        Args:
            p: fragment.
            learner: its learner.
            steps: number of steps in it.
            present: norms and steps of the contributions to the same round, by learner.
        """
        known = {name: list(recent.whole) for name, recent in self._recent[p].items()}
        own = known.pop(learner, [])
        others = {name: samples for name, samples in known.items() if len(samples) >= MIN_SAMPLES}
        if len(others) < 2 and len(own) < MIN_SAMPLES:
            names = (known.keys() | present.keys()) - {learner}
            others = {name: known.get(name, []) + [present[name] for _ in range(name in present)] for name in names}
        usual = [norm for name, samples in others.items() if (norm := self._usual(p, name, samples, steps))]
        if usual:
            middle = median_high(usual)
            own_norm = self._usual(p, learner, own, steps) if len(own) >= MIN_SAMPLES else 0.0
            base = max(middle, min(own_norm, NORM_GUARD * middle))
            if len(usual) >= 2:
                return Limit(SCALE_DOWN * base, NORM_GUARD * base, middle, len(usual))
            return Limit(NORM_GUARD * base, math.inf, middle, 1)
        everything = self._recent[p][learner].all
        own_norm = self._usual(p, learner, everything, steps) if len(everything) >= MIN_SAMPLES else 0.0
        return Limit(NORM_GUARD * own_norm or math.inf)

    def _usual(self, p: int, learner: str, samples: Sequence[Sample] | deque[Sample], steps: int) -> float:
        """Return a learner's usual norm for this number of steps (rule 6); 0 if unknown."""
        recent = self._recent[p].get(learner)
        return max(_usual(samples, steps), 0.0 if recent is None else FLOOR * recent.peak * steps)


def _usual(samples: Sequence[Sample] | deque[Sample], steps: int) -> float:
    """Return the usual norm of a contribution with this number of steps; 0 if unknown."""
    norms = [norm * _growth(steps / num_steps) for norm, num_steps in samples if norm > 0]  # `present` may have zeros
    return median(norms) if norms else 0.0


def _growth(ratio: float) -> float:
    return max(ratio, math.sqrt(ratio))
