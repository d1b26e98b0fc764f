"""Shares of the fleet's work, which decide how far each contribution of a round moves the anchor.

Let learner m do v_m = tokens * (tokens / steps) of work per second (the paper's weight, quantity times quality, per
unit of time). With a constant set of learners, one period T brings a contribution d_m of each, and the paper merges
sum(a_m d_m) with a_m = v_m T / sum(v T) = v_m / sum(v). So the anchor moves by a_m d_m for the work in d_m. This must
not depend on the rounds in which the work arrives:

    share_m = v_m / sum of v over all learners at work, contributors or not

1. If all learners contribute to a round, the shares sum to 1 and the merge is the paper's. If one of four equal
   learners contributes, its share is 1/4, and four such rounds move the anchor as far as one round of all. The paper
   normalizes within the round: those four rounds would move the anchor four times as far, and training diverges if
   rounds have few contributors.
2. Shares do not depend on the number of steps in a contribution: with twice the steps it is about twice as long, and so
   moves the anchor twice as far.
3. Learners report their own rates. A rate counts at most MAX_RATE times the median of the others, so that no learner
   can claim to be the whole fleet. A rate above MAD times that median is an error and counts as the median.
4. The outer momentum depends on `work` = sum(share_m * steps_m) / H, which is 1 for a round of all learners with H
   steps each (`core.outer.momentum_by_work`).

Source: weights from arXiv 2604.21428, Sec. 3.2; normalizing over the whole fleet is our choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high

from lightning_diloco.protocol.syncer.roster import Member

MAX_RATE = 10.0
MAD = 1e6  # for example a thousand times the tokens per step, which enter the rate as a square


def shares_of_work(contributors: Sequence[Member], at_work: Iterable[Member]) -> tuple[float, ...]:
    """Compute the share of each contributor.

    Args:
        contributors: members of the round; they count as at work.
        at_work: all learners that are producing work for the anchor. A learner without a known rate counts with the
            average rate.

    Returns:
        One share per contributor, above 0, with a sum of at most 1.
    """
    fleet = {member.session: member for member in (*at_work, *contributors)}
    said = {session: rate for session, member in fleet.items() if (rate := member.work_per_s) is not None}
    known = {session: _believed(session, said) for session in said}
    average = math.fsum(known.values()) / len(known) if known else 1.0
    rates = {session: known.get(session, average) for session in fleet}
    total = math.fsum(rates.values())
    return tuple(rates[member.session] / total for member in contributors)


def _believed(session: str, said: Mapping[str, float]) -> float:
    """Limit the rate that a learner reports (rule 3)."""
    others = [rate for other, rate in said.items() if other != session]
    if not others:
        return said[session]
    usual = median_high(others)
    return usual if said[session] > MAD * usual else min(said[session], MAX_RATE * usual)
