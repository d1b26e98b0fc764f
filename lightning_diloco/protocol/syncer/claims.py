"""Plausibility checks: a learner's reported tokens and steps are compared with those of the other learners.

1. A token counter is compared with those of at least two other learners. With only one other, the syncer cannot tell
   which of the two is wrong. Of an even number of values, the upper median is used.
2. Tokens per step above MAX_TOKENS times the median of the others mean a wrong counter, not a larger batch. Such a
   learner cannot take part, because token counts decide schedules and the end of the run for all learners. The limit is
   cached until a report exceeds it, because heartbeats are frequent.
3. The number of steps in a contribution decides how large its norm may be. The steps are limited to MAX_FASTER times
   the pace of the others.

Source: our choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median_high

from lightning_diloco.protocol.messages import Ready
from lightning_diloco.protocol.syncer.roster import Member, Roster

MAX_TOKENS = 1000.0
MAX_FASTER = 10.0
SLACK_PERIODS = 2


def implausible_tokens(member: Member, roster: Roster, *, tokens: int, steps: int) -> str | None:
    """Return why the token counter is implausible for this number of steps; None if it is plausible."""
    if steps < 1 or tokens <= member.most_tokens * steps:
        return None
    others = [other.tokens / other.step for other in _others(member, roster) if other.tokens and other.step]
    if len(others) < 2:
        return None
    usual = median_high(others)
    member.most_tokens = MAX_TOKENS * usual
    if tokens <= member.most_tokens * steps:
        return None
    return (
        f"{tokens} tokens in {steps} steps; the other learners count {usual:.3g} per step, and at most {MAX_TOKENS:g} "
        "times as many are plausible; pass a token_count_fn that counts like theirs"
    )


def plausible_steps(member: Member, ready: Ready, roster: Roster, *, now_s: float, sync_every: int) -> int:
    """Return the steps of a contribution, limited to a plausible number (rule 3)."""
    slack = SLACK_PERIODS * sync_every
    if ready.steps <= slack:
        return ready.steps
    since_s = member.merged_s.get(ready.fragment, member.active_s)
    times = [other.step_s for other in _others(member, roster) if other.step_s]
    if since_s is None or not times:
        return ready.steps  # there is nothing to compare with
    step_s = median_high(times) / MAX_FASTER
    return min(ready.steps, math.ceil((now_s - since_s) / step_s) + slack)


def _others(member: Member, roster: Roster) -> Iterable[Member]:
    return (other for other in roster.live() if other.learner != member.learner)
