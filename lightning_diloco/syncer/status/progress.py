"""Progress notes on the tape, from which pictures of a run are drawn.

The pause between two notes grows with the age of the run, from MIN_PAUSE_S to MAX_PAUSE_S. A short run therefore has
enough notes for a picture, and a long run writes a few megabytes per month and learner.
"""

from __future__ import annotations

from lightning_diloco.protocol.metric_names import EVAL_LOSS, LOSS
from lightning_diloco.transport.base import Json

EVENT = "progress"
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
_SHARE_OF_AGE = 0.01
_OF_RUN = ("fleet_tokens", "goodput", "participation", "bytes_up", "bytes_down", "ledger")
_OF_LEARNER = ("id", "phase", "step", "tokens", "tokens_per_s", "staleness_versions")


def pause_s(age_s: float) -> float:
    """Return the seconds until the next note of a run of this age."""
    return min(MAX_PAUSE_S, max(MIN_PAUSE_S, _SHARE_OF_AGE * age_s))


def progress(status: Json) -> Json:
    """Return the fields of a note, taken from the result of `report.status`."""
    learners = [
        {
            **{name: learner[name] for name in _OF_LEARNER},
            **{name: learner["metrics"].get(name) for name in (LOSS, EVAL_LOSS)},
        }
        for learner in status["learners"]
    ]
    return {**{name: status[name] for name in _OF_RUN}, "learners": learners}
