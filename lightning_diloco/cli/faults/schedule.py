"""The fault schedule of a chaos run: a seeded Poisson process.

1. Times between faults are exponential, so faults can come close together and overlap.
2. Kinds are drawn from a shuffled deck that holds each kind once, so all kinds are equally frequent.
3. Durations are log-uniform over `LASTS_S`. Most are shorter than a lease, some are longer.

Source: our choice.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["kill", "stop", "cut", "slow", "syncer", "shard"]

KINDS: tuple[Kind, ...] = get_args(Kind)
WITHOUT_SHARDS = tuple(kind for kind in KINDS if kind != "shard")
SYNCER = "syncer"
SHARD = "shard-"  # with a number: target of a fault
LASTS_S: dict[Kind, tuple[float, float]] = {"stop": (1.0, 30.0), "cut": (1.0, 30.0), "slow": (5.0, 30.0)}
DELAY_S = (0.02, 0.2)
RATE_BPS = (2e6, 2e7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        number: 1, 2, ... in time order.
        at_s: seconds after the start of the schedule.
        kind: "kill": SIGKILL to a learner; "stop": SIGSTOP, later SIGCONT; "cut" and "slow": its network; "syncer"
            and "shard": SIGKILL to the syncer or to a shard.
        target: learner id, "syncer", or "shard-1".
        lasts_s: duration; 0 for a kill.
        is_half_open: whether a "cut" keeps connections open without passing data, instead of resetting them.
        delay_s: one-way delay of a "slow" network.
        rate_bps: rate of a "slow" network in each direction.
    """

    number: int
    at_s: float
    kind: Kind
    target: str
    lasts_s: float = 0.0
    is_half_open: bool = False
    delay_s: float = 0.0
    rate_bps: float | None = None


def draw(
    kinds: Sequence[Kind], learners: Sequence[str], *, num_shards: int, faults_per_hour: float, seed: int
) -> Iterator[Fault]:
    """Yield an endless sequence of faults in time order.

    Args:
        kinds: kinds of faults to draw.
        learners: learner ids.
        num_shards: number of shards, including the syncer; above 1 if `kinds` has "shard".
        faults_per_hour: total over all kinds and targets, > 0.
        seed: determines the whole schedule.
    """
    chance = random.Random(seed)
    at_s, deck = 0.0, list[Kind]()
    for number in itertools.count(1):
        at_s += chance.expovariate(faults_per_hour / 3600.0)
        if not deck:
            deck = chance.sample(list(kinds), len(kinds))
        kind = deck.pop()
        yield Fault(
            number=number,
            at_s=at_s,
            kind=kind,
            target=_target(chance, kind, learners, num_shards),
            lasts_s=_log_uniform(chance, *LASTS_S[kind]) if kind in LASTS_S else 0.0,
            is_half_open=kind == "cut" and chance.random() < 0.5,
            delay_s=_log_uniform(chance, *DELAY_S) if kind == "slow" else 0.0,
            rate_bps=_log_uniform(chance, *RATE_BPS) if kind == "slow" else None,
        )


def _target(chance: random.Random, kind: Kind, learners: Sequence[str], num_shards: int) -> str:
    if kind == "syncer":
        return SYNCER
    if kind == "shard":
        return f"{SHARD}{chance.randrange(1, num_shards)}"
    return chance.choice(list(learners))


def _log_uniform(chance: random.Random, low: float, high: float) -> float:
    return math.exp(chance.uniform(math.log(low), math.log(high)))
