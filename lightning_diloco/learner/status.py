"""Status of a learner for its progress bar, and metrics for its loggers."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_diloco.learner.control_channel import ControlChannel
from lightning_diloco.learner.exchange import FragmentExchange
from lightning_diloco.learner.step_timer import StepTimer
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.protocol.metric_names import EXCHANGE_P95, STALL


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """Status of a learner.

    Args:
        versions: oldest and newest anchor version of its fragments.
        staleness_versions: versions that its stalest fragment is behind the newest offer.
        in_flight: fragments with an outstanding contribution.
        num_learners: number of live learners, including this one; None: unknown.
        offline_s: seconds since the syncer could last be reached; None while online.
    """

    versions: tuple[int, int]
    staleness_versions: int
    in_flight: tuple[int, ...]
    num_learners: int | None
    offline_s: float | None


def standing(machine: LearnerState, control: ControlChannel) -> LearnerStatus:
    """Return the status; the caller must hold the state machine's lock."""
    landed = [f.landed for f in machine.fragments]
    return LearnerStatus(
        versions=(min(landed), max(landed)),
        staleness_versions=machine.staleness_versions,
        in_flight=tuple(p for p, f in enumerate(machine.fragments) if f.outstanding is not None),
        num_learners=control.news.num_learners,
        offline_s=control.outage_s,
    )


def metrics(
    machine: LearnerState, timer: StepTimer, exchange: FragmentExchange, control: ControlChannel
) -> dict[str, float]:
    """Return the known metrics, by name; the caller must hold the state machine's lock."""
    news = control.news
    told = {"fleet_tokens": news.fleet_tokens, "fleet/learners": news.num_learners, "diloco/cosine": news.cosine}
    return {
        STALL: timer.stall_s,
        EXCHANGE_P95: timer.exchange_p95_s,
        "diloco/num_exchanges": float(timer.num_exchanges),
        "diloco/staleness_versions": float(machine.staleness_versions),
        "diloco/pseudo_gradient_norm": exchange.norm,
        "diloco/quantization_error": exchange.relative_error,
        "diloco/offline_s": control.offline_s,
        "diloco/bytes_up": float(exchange.bytes_up),
        "diloco/bytes_down": float(exchange.bytes_down),
        "diloco/tokens_repeated": float(machine.lessee.num_repeated),
        "perf/tokens_per_s": timer.tokens_per_s,
        "perf/step_s": timer.step_s,
        **{name: float(value) for name, value in told.items() if value is not None},
    }
