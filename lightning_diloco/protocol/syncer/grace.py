"""The grace window: how long a round with a quorum waits for more contributions.

Source: the paper, Eq. 3. It does not give gamma; 0.8 and the limit of one step are our choice, measured in simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

GAMMA = 0.8
MIN_SAMPLES = 3


@dataclass(slots=True)
class Ema:
    """Exponential moving average that starts as a plain mean.

    Args:
        weight: weight of a new sample after the first 1 / weight samples, 0..1.
    """

    weight: float = 0.2
    mean: float = 0.0
    num_samples: int = 0

    def add(self, sample: float) -> None:
        self.num_samples += 1
        self.mean += max(self.weight, 1.0 / self.num_samples) * (sample - self.mean)

    @property
    def is_settled(self) -> bool:
        return self.num_samples >= MIN_SAMPLES


def grace_window_s(*, overlap: int, step_s: float, quorum_s: float, sync_s: float, gamma: float = GAMMA) -> float:
    """Compute the grace window: gamma times the slack before a learner would miss the landing.

    Args:
        overlap: tau, steps between snapshot and landing.
        step_s: time per inner step of the learner that opened the round; never that of a slower learner.
        quorum_s: mean time from announcement to quorum.
        sync_s: mean time from closing to the arrival of the commit.
        gamma: part of the slack that is used, 0..1.

    Returns:
        Seconds, from 0 to step_s.
    """
    slack_s = overlap * step_s - (quorum_s + sync_s)
    return min(step_s, gamma * max(slack_s, 0.0))
