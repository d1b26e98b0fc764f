"""What a learner says of itself, held against what others do: tokens, steps and times that cannot be.

1. Two other learners must say so; with one other it cannot be told who is wrong. The middle of an even number of others
   is the larger one.
2. Tokens per step above MAX_TOKENS times the others' are a counter that is wrong, not a larger batch. The learner
   cannot take part: everything that counts tokens (schedules, the end of the run) would be wrong for all. Others are
   asked once, and again only if it says more: heartbeats are many.
3. Steps are counted, where they excuse a long contribution, at most as fast as MAX_FASTER times the others make them.

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
    """Why so many tokens cannot come from so many steps, if so."""
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
        f"{tokens} tokens in {steps} steps; the other learners train on {usual:.3g} a step, at most {MAX_TOKENS:g} "
        "times as many are believed; pass a token_count_fn that counts as theirs does"
    )


def plausible_steps(member: Member, ready: Ready, roster: Roster, *, now_s: float, sync_every: int) -> int:
    """Steps that can be in this contribution."""
    since_s = member.merged_s.get(ready.fragment, member.active_s)
    times = [other.step_s for other in _others(member, roster) if other.step_s]
    if since_s is None or not times:
        return ready.steps  # nobody knows better
    step_s = median_high(times) / MAX_FASTER
    return min(ready.steps, math.ceil((now_s - since_s) / step_s) + SLACK_PERIODS * sync_every)


def _others(member: Member, roster: Roster) -> Iterable[Member]:
    return (other for other in roster.live() if other.learner != member.learner)
