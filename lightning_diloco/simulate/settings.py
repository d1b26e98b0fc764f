"""What a simulated fleet is made of: how its network behaves, and how fast a learner goes."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_diloco.config import Align, RunConfig
from lightning_diloco.protocol.codec import Json
from lightning_diloco.simulate.reading import Data


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How messages and payloads travel.

    Args:
        latency_s: one way, for control messages.
        upload_s, download_s: for one fragment.
        loss, repeats: probability that a control message vanishes, or arrives twice.
        jitter: messages are delayed by up to this many latencies more, so they may overtake each other.
    """

    latency_s: float = 0.001
    upload_s: float = 0.05
    download_s: float = 0.05
    loss: float = 0.0
    repeats: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast one learner goes.

    Args:
        step_s: seconds per inner step.
        jitter: steps vary uniformly by this fraction of step_s.
        tokens: per step.
        starts_s: when the process starts.
        num_steps: it finishes after these; None: it goes on.
        align: its landing rule.
        drain_s: how long it waits at its end.
        upload_factor: its uploads take this many times as long as others'.
        data: what it leases and reads, a sample for each token; None: it has data of its own.
    """

    step_s: float = 1.0
    jitter: float = 0.0
    tokens: int = 100
    starts_s: float = 0.0
    num_steps: int | None = None
    align: Align = "carry"
    drain_s: float = 60.0
    upload_factor: float = 1.0
    data: Data | None = None


def manifest(config: RunConfig) -> Json:
    """What a seeder would say of its model."""
    return {
        "config": config.to_dict(),
        "num_fragments": config.fragments_wanted,
        "plan_digest": "digest",
        "frozen": {},
        "token_unit": "tokens",
    }
