"""How far each contribution of a round moves the anchor: its learner's share of the fleet's work.

Let learner m do v_m = tokens * (tokens / steps) of work per second: quantity times quality, the paper's weight, per
unit of time. While nobody comes or goes, one period T brings contributions d_m of all learners, and the paper merges
sum(a_m d_m) with a_m = v_m T / sum(v T) = v_m / sum(v). So the anchor takes a_m d_m for the work d_m. That must not
depend on the rounds in which the work arrives:

    share_m = v_m / sum of v over all learners at work, contributors or not

1. If all learners are in a round, shares sum to 1 and the merge is the paper's. If one of four equal learners is, its
   share is 1/4; four such rounds move the anchor as far as one round of all. Normalized within the round, as the paper
   does it, they would move it four times as far, and training diverges where rounds gather few learners.
2. A contribution of twice the steps holds twice the work and moves the anchor twice as far: shares do not depend on it.
3. Rates are what learners say of themselves. No rate counts as more than MAX_RATE times the median of the others', of
   one other learner likewise, so that nobody becomes all of the fleet by a word. A rate MAD times as high is no rate,
   and counts as the others' median.
4. What the outer momentum sees is `work`: sum(share_m * steps_m) / H, 1 for a round of all with H steps each
   (`core.outer.momentum_by_work`).

Source: weights are those of arXiv 2604.21428, Sec. 3.2; taking them over the whole fleet is our choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high

from lightning_diloco.protocol.syncer.roster import Member

MAX_RATE = 10.0
MAD = 1e6  # a thousand times the tokens a step


def shares_of_work(contributors: Sequence[Member], at_work: Iterable[Member]) -> tuple[float, ...]:
    """One share for each contributor, above 0; they sum to 1 at most.

    Args:
        contributors: of a round; each of them counts as at work.
        at_work: all learners whose work is on its way to the anchor. One whose rate is not known yet counts as an
            average one.
    """
    fleet = {member.session: member for member in (*at_work, *contributors)}
    said = {session: rate for session, member in fleet.items() if (rate := member.work_per_s) is not None}
    known = {session: _believed(session, said) for session in said}
    average = math.fsum(known.values()) / len(known) if known else 1.0
    rates = {session: known.get(session, average) for session in fleet}
    total = math.fsum(rates.values())
    return tuple(rates[member.session] / total for member in contributors)


def _believed(session: str, said: Mapping[str, float]) -> float:
    """Rule 3."""
    others = [rate for other, rate in said.items() if other != session]
    if not others:
        return said[session]
    usual = median_high(others)
    return usual if said[session] > MAD * usual else min(said[session], MAX_RATE * usual)
