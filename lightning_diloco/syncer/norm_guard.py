"""How long contributions usually are for the work in them, and how long one may be.

1. A learner is judged by others: by the median of their usual norms, each being the median of its own last ones. A few
   broken learners do not move it. What counts is what was merged whole, and what others sent to the same round.
2. Learners that have sent MIN_SAMPLES to a fragment judge the others. Before that, all do: first rounds have nothing
   else to go by.
3. By the word of two others or more, what is SCALE_DOWN times the usual norm is scaled down, and what is NORM_GUARD
   times is refused. By the word of one, or of its own past, it is scaled down at NORM_GUARD times: who of two is broken
   cannot be told. A learner that has always been longer, because its learning rate is another one, or because the
   others have just begun to warm up, may stay so: its own usual norm counts up to NORM_GUARD times that of the others.
4. Alone, a learner is judged by all that it sent, once that is MIN_SAMPLES. If all of it was zero, as that of frozen
   parameters is, nothing is known of it.
5. Contributions of other lengths are compared by the steps in them. Steps in one direction add up, independent ones
   grow by the square root: of twice the steps, the norm may be twice as long, of half the steps, half the root.
6. Learnt anew from the tape after a restart. Commits do not depend on it: each is on record with its limits.

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

Sample = tuple[float, int]  # norm, steps


@dataclass(frozen=True, slots=True)
class Limit:
    """How long one contribution may be.

    Args:
        norm: a longer one is scaled down to this; infinite while nothing is known.
        refused: a longer one is refused.
        usual: what others' contributions usually are, for as much work; 0: there are no others.
        num_others: learners that say so.
    """

    norm: float = math.inf
    refused: float = math.inf
    usual: float = 0.0
    num_others: int = 0


class _Recent:
    """The last norms of one learner in one fragment: all of them, and those that were merged whole."""

    def __init__(self) -> None:
        self.all: deque[Sample] = deque(maxlen=NUM_RECENT)
        self.whole: deque[Sample] = deque(maxlen=NUM_RECENT)


class NormGuard:
    """The norms of one run."""

    def __init__(self) -> None:
        self._recent: dict[int, dict[str, _Recent]] = defaultdict(lambda: defaultdict(_Recent))

    def learn(
        self, p: int, learners: Sequence[str], norms: Sequence[float], steps: Sequence[int], kept: Sequence[float]
    ) -> None:
        """These were committed to this fragment; norms as they came, before any was scaled down to the part kept."""
        for learner, *sample, part in zip(learners, norms, steps, kept, strict=True):
            recent = self._recent[p][learner]
            recent.all.append((sample[0], sample[1]))
            if part == 1:
                recent.whole.append((sample[0], sample[1]))

    def limit(self, p: int, learner: str, steps: int, present: Mapping[str, Sample]) -> Limit:
        """How long a contribution of this learner may be, with so many steps.

        Args:
            p: the fragment.
            learner: whose it is.
            steps: in it.
            present: norms and steps of the contributions to the same round, by learner.
        """
        known = {name: list(recent.whole) for name, recent in self._recent[p].items()}
        own = known.pop(learner, [])
        others = [samples for samples in known.values() if len(samples) >= MIN_SAMPLES]
        if len(others) < 2 and len(own) < MIN_SAMPLES:
            names = (known.keys() | present.keys()) - {learner}
            others = [known.get(name, []) + [present[name] for _ in range(name in present)] for name in names]
        usual = [norm for samples in others if (norm := _usual(samples, steps))]
        if usual:
            middle = median_high(usual)
            own_norm = _usual(own, steps) if len(own) >= MIN_SAMPLES else 0.0
            base = max(middle, min(own_norm, NORM_GUARD * middle))
            if len(usual) >= 2:
                return Limit(SCALE_DOWN * base, NORM_GUARD * base, middle, len(usual))
            return Limit(NORM_GUARD * base, math.inf, middle, 1)
        everything = self._recent[p][learner].all
        own_norm = _usual(everything, steps) if len(everything) >= MIN_SAMPLES else 0.0
        return Limit(NORM_GUARD * own_norm or math.inf)


def _usual(samples: Sequence[Sample] | deque[Sample], steps: int) -> float:
    """The norm that a contribution of so many steps would usually have; 0: not known."""
    norms = [norm * _growth(steps / num_steps) for norm, num_steps in samples if norm > 0]
    return median(norms) if norms else 0.0


def _growth(ratio: float) -> float:
    return max(ratio, math.sqrt(ratio))
