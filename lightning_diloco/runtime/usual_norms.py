"""How long contributions to each fragment usually are, and how long one may be.

1. A running mean of those that were committed, from which one alone cannot move it far. Nothing is limited before
   MIN_GUARD_SAMPLES of them.
2. Learnt anew from the tape after a restart: who had been limited before is so at once. Commits do not depend on it,
   for each is on record with the limit that it was made with.

Source: our choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NORM_GUARD = 10.0
MIN_GUARD_SAMPLES = 8
MAX_GUARD_SAMPLES = 20


class UsualNorms:
    """The norms of one run."""

    def __init__(self) -> None:
        self._usual: dict[int, tuple[float, int]] = {}

    def learn(self, p: int, norms: Sequence[float]) -> None:
        """These were committed to this fragment, in this order of commits."""
        mean, num_samples = self._usual.get(p, (0.0, 0))
        for norm in norms:
            num_samples += 1
            mean += (min(norm, NORM_GUARD * mean if mean else norm) - mean) / min(num_samples, MAX_GUARD_SAMPLES)
        self._usual[p] = (mean, num_samples)

    def limit(self, p: int) -> float:
        """Longer contributions to this fragment are scaled down to this; infinite while little is known."""
        mean, num_samples = self._usual.get(p, (0.0, 0))
        return NORM_GUARD * mean if num_samples >= MIN_GUARD_SAMPLES and mean > 0 else math.inf
