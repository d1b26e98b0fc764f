"""How long contributions usually are for the work in them, and how long one may be.

1. A learner is judged by the contributions of others; alone, by its own. Nothing is limited before MIN_SAMPLES of them.
2. The limit is NORM_GUARD times the median, which a few bad learners do not move.
3. Contributions of other lengths are compared by the steps in them. Steps in one direction add up, independent ones
   grow by the square root: of twice the steps, the norm may be twice as long, of half the steps, half the root.
4. Learnt anew from the tape after a restart. Commits do not depend on it: each is on record with its limits.

Source: our choice.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

NORM_GUARD = 10.0
MIN_SAMPLES = 8
NUM_RECENT = 16  # of each learner and fragment


class UsualNorms:
    """The norms of one run."""

    def __init__(self) -> None:
        self._recent: dict[int, dict[str, deque[tuple[float, int]]]] = defaultdict(dict)

    def learn(self, p: int, learners: Sequence[str], norms: Sequence[float], steps: Sequence[int]) -> None:
        """These were committed to this fragment; norms as they came, before any was scaled down."""
        for learner, norm, num_steps in zip(learners, norms, steps, strict=True):
            self._recent[p].setdefault(learner, deque(maxlen=NUM_RECENT)).append((norm, num_steps))

    def limit(self, p: int, learner: str, steps: int) -> float:
        """A longer contribution of this learner, of so many steps, is scaled down to this; infinite while little is
        known."""
        recent = self._recent[p]
        samples = [sample for other, found in recent.items() if other != learner for sample in found]
        samples = samples or list(recent.get(learner, ()))
        usual = [norm * _growth(steps / num_steps) for norm, num_steps in samples if norm > 0]
        return NORM_GUARD * median(usual) if len(usual) >= MIN_SAMPLES else math.inf


def _growth(ratio: float) -> float:
    return max(ratio, math.sqrt(ratio))
