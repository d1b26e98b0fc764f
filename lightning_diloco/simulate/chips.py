"""The chips of one learner: when they fail and return, and how long training pauses for it.

1. Chips fail independently, each once per `mtbi_s` on average. A failed chip takes its slice with it. The time until
   the slice returns has an exponentiated Weibull distribution.
2. An elastic learner goes on with the slices that are left. It pauses for `rescale_s` after a failure. A rescale
   includes slices that fail or return in its first half. A failure in its second half makes it longer by up to half.
3. A slice that is back waits for the next failure, so that one rescale handles both. It waits at most for `hold_s`.
4. A learner that is not elastic needs all of its chips. It continues on spare chips `restart_s` after a failure.
   Failures during that time are included.
5. A pause discards the step that it interrupts, and no other.
6. Failures begin WARM_UP medians of `return_s` before the time 0, so that slices are missing from the start.

Source: Poisson failures and exponentiated Weibull returns are the paper's. It does not publish the rest:
rules 2 to 6 and all defaults are our choice, see `tests/bench/goodput_table.py`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

YEAR_S = 365.25 * 86400
WARM_UP = 8.0
RETURN_SHAPES = 1.5, 1.2  # exponents of the exponentiated Weibull distribution: outer, inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Chips:
    """The chips of one learner.

    Args:
        count: number of chips, >= 1.
        slice_chips: chips that are lost together.
        mtbi_s: mean time between interruptions of one chip, or of one slice.
        failures_per: whether each chip or each slice fails once per mtbi_s.
        is_elastic: whether training goes on with the slices that are left.
        rescale_s: duration of a rescale.
        hold_s: how long a slice that is back waits for the next failure.
        return_s: median time until a failed slice is back.
        restart_s: time from a failure to the next step of a learner that is not elastic.
    """

    count: float
    slice_chips: float = 64
    mtbi_s: float = YEAR_S
    failures_per: Literal["chip", "slice"] = "chip"
    is_elastic: bool = True
    rescale_s: float = 16.0
    hold_s: float = 45.0
    return_s: float = 1200.0
    restart_s: float = 76.0

    @property
    def num_slices(self) -> int:
        """Return the number of slices."""
        return max(1, round(self.count / self.slice_chips))

    @property
    def failure_s(self) -> float:
        """Return the mean time between failures of the learner while all slices are there."""
        return self.mtbi_s / (self.count if self.failures_per == "chip" else self.num_slices)


@dataclass(frozen=True, slots=True)
class Pause:
    """A time without training, and the share of the slices that train after it."""

    begins_s: float
    ends_s: float
    share: float


def pauses(chips: Chips, chance: random.Random, *, until_s: float = math.inf) -> Iterator[Pause]:
    """Yield the pauses of a learner that begin before `until_s`, in order; none overlap.

    The last pause that began before the time 0 begins at 0, because its share of the slices holds from then on.
    """
    found = _of_elastic(chips, chance) if chips.is_elastic else _of_rigid(chips, chance)
    return takewhile(lambda pause: pause.begins_s < until_s, _from_zero(found))


def _from_zero(found: Iterator[Pause]) -> Iterator[Pause]:
    earlier: Pause | None = None
    for pause in found:
        if pause.begins_s >= 0:
            if earlier is not None:
                yield Pause(0.0, max(0.0, earlier.ends_s), earlier.share)
            yield pause
            break
        earlier = pause
    yield from found


def _of_rigid(chips: Chips, chance: random.Random) -> Iterator[Pause]:
    fails_s = _next_failure_s(chips, chance, 0.0)
    while True:
        ends_s = fails_s + chips.restart_s
        yield Pause(fails_s, ends_s, 1.0)
        while fails_s < ends_s:
            fails_s = _next_failure_s(chips, chance, fails_s)


def _of_elastic(chips: Chips, chance: random.Random) -> Iterator[Pause]:
    fails_s = _next_failure_s(chips, chance, -WARM_UP * chips.return_s)
    away: list[float] = []  # when each missing slice returns, as a heap
    while True:
        begins_s = min(fails_s, away[0] + chips.hold_s if away else math.inf)
        ends_s = begins_s + chips.rescale_s
        while fails_s < ends_s:
            if chance.random() * chips.num_slices >= len(away):  # otherwise it hit a slice that is away
                heapq.heappush(away, fails_s + _return_s(chips, chance))
                ends_s = max(ends_s, fails_s + chips.rescale_s / 2)
            if len(away) >= chips.num_slices:  # nothing is left
                ends_s = max(ends_s, away[0] + chips.rescale_s)
            fails_s = _next_failure_s(chips, chance, fails_s)
        while away and away[0] <= ends_s:
            heapq.heappop(away)
        yield Pause(begins_s, ends_s, 1 - len(away) / chips.num_slices)


def trained_s(stops: Iterable[Pause], *, step_s: float, until_s: float) -> float:
    """Return the time in whole steps that a learner trains between these pauses, multiplied by its share of slices.

    Args:
        stops: the pauses that begin before `until_s`.
        step_s: seconds per step.
        until_s: end of training.
    """
    done_s, share, now_s = 0.0, 1.0, 0.0
    for pause in (*stops, Pause(until_s, until_s, 1.0)):
        done_s += share * step_s * max(0, math.floor((pause.begins_s - now_s) / step_s))
        now_s, share = pause.ends_s, pause.share
    return done_s


def _next_failure_s(chips: Chips, chance: random.Random, now_s: float) -> float:
    return now_s + chance.expovariate(1 / chips.failure_s)


def _return_s(chips: Chips, chance: random.Random) -> float:
    """Draw from the exponentiated Weibull distribution with median `return_s`."""
    return chips.return_s * _weibull(chance.random()) / _weibull(0.5)


def _weibull(quantile: float) -> float:
    outer, inner = RETURN_SHAPES
    return float((-math.log1p(-(quantile ** (1 / outer)))) ** (1 / inner))
