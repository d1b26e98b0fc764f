"""Where a learner stands in its run at this moment, for its progress bar."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_diloco.protocol import LearnerState
from lightning_diloco.runtime.line import Line


@dataclass(frozen=True, slots=True)
class Standing:
    """A learner's place in its run.

    Args:
        versions: oldest and newest anchor version it holds.
        staleness_versions: how far its stalest fragment is behind what was offered.
        in_flight: fragments whose contribution is on its way.
        num_learners: that take part, itself included; None: not heard yet.
        offline_s: for how long the syncer has been out of reach; None: it answers.
    """

    versions: tuple[int, int]
    staleness_versions: int
    in_flight: tuple[int, ...]
    num_learners: int | None
    offline_s: float | None


def standing(machine: LearnerState, line: Line) -> Standing:
    """Read it off; the machine is locked by the caller."""
    landed = [f.landed for f in machine.fragments]
    return Standing(
        versions=(min(landed), max(landed)),
        staleness_versions=machine.staleness_versions,
        in_flight=tuple(p for p, f in enumerate(machine.fragments) if f.outstanding is not None),
        num_learners=line.news.num_learners,
        offline_s=line.outage_s,
    )
