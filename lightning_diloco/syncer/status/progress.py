"""How far a run has come, noted on the tape from time to time: what pictures of it are drawn from.

The pause between two notes grows with the age of the run, from MIN_PAUSE_S to MAX_PAUSE_S: a short run has enough of
them to draw, a long one a few megabytes a month and learner.
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
    """Time until the next note of a run of this age."""
    return min(MAX_PAUSE_S, max(MIN_PAUSE_S, _SHARE_OF_AGE * age_s))


def progress(status: Json) -> Json:
    """The fields of a note, from what `report.status` says."""
    learners = [
        {
            **{name: learner[name] for name in _OF_LEARNER},
            **{name: learner["metrics"].get(name) for name in (LOSS, EVAL_LOSS)},
        }
        for learner in status["learners"]
    ]
    return {**{name: status[name] for name in _OF_RUN}, "learners": learners}
