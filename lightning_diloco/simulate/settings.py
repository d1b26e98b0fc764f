"""Settings of a simulated fleet: its network, and the pace of its learners."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_diloco.config import Align, RunConfig
from lightning_diloco.protocol.codec import Json
from lightning_diloco.simulate.reading import Data


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between learners and syncer.

    Args:
        latency_s: one-way latency of control messages.
        upload_s, download_s: transfer time of one contribution or update; a learner's transfers follow one another.
        loss, repeats: probability that a control message is lost, or arrives twice.
        jitter: maximum extra delay of a message, in latencies; messages may overtake each other.
    """

    latency_s: float = 0.001
    upload_s: float = 0.05
    download_s: float = 0.05
    loss: float = 0.0
    repeats: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of one learner.

    Args:
        step_s: seconds per inner step.
        jitter: steps vary uniformly by this fraction of step_s.
        tokens: tokens per step.
        starts_s: start time of the process.
        num_steps: number of steps before it finishes; None: no limit.
        align: landing rule.
        drain_s: longest wait in its drain.
        upload_factor: factor of its upload times.
        has_ranks: whether the learner has several ranks (`protocol/learner/boundary_promises.py`).
        data: data that it leases and reads, one sample per token; None: it has its own data.
    """

    step_s: float = 1.0
    jitter: float = 0.0
    tokens: int = 100
    starts_s: float = 0.0
    num_steps: int | None = None
    align: Align = "carry"
    drain_s: float = 60.0
    upload_factor: float = 1.0
    has_ranks: bool = False
    data: Data | None = None


def manifest(config: RunConfig) -> Json:
    """Return the manifest that a seeder sends."""
    return {
        "config": config.to_dict(),
        "num_fragments": config.fragments_wanted,
        "plan_digest": "digest",
        "frozen": {},
        "token_unit": "tokens",
    }
