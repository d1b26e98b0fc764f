"""A run's status as Prometheus metrics, generated at every scrape.

`diloco_up` is 1 while the syncer answers. Without an answer it is the only metric, because old values would look
current.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lightning_diloco.protocol.metric_names import EVAL_LOSS, LOSS, STALL

Status = Mapping[str, Any]
CONTENT_TYPE = CONTENT_TYPE_LATEST

_COUNTERS = {
    "diloco_fleet_tokens": ("fleet_tokens", "Tokens seen by all learners"),
    "diloco_commits": ("num_commits", "Rounds committed"),
    "diloco_received_bytes": ("bytes_up", "Payload bytes received by the syncer since it started"),
    "diloco_sent_bytes": ("bytes_down", "Payload bytes sent by the syncer since it started"),
}
_GAUGES = {
    "diloco_participation_ratio": ("participation", "Contributors per stepping learner, over all rounds"),
    "diloco_goodput_ratio": ("goodput", "Tokens merged per token that an undisturbed fleet would have trained"),
    "diloco_quorum": ("effective_quorum", "Contributions that a round needs now"),
    "diloco_uptime_seconds": ("uptime_s", "Age of the syncer process"),
}
_OF_LEARNER = {
    "diloco_learner_step": ("step", "Inner steps completed"),
    "diloco_learner_tokens": ("tokens", "Tokens seen by this process of the learner"),
    "diloco_learner_tokens_per_second": ("tokens_per_s", "Median undisturbed rate"),
    "diloco_learner_staleness_versions": ("staleness_versions", "Versions behind, of its stalest fragment"),
    "diloco_learner_refused": ("num_refused", "Contributions that were refused"),
    "diloco_learner_scaled_down": ("num_clipped", "Contributions that were merged with their norm scaled down"),
    "diloco_learner_silent_seconds": ("last_heard_s_ago", "Time since it was last heard from"),
}
_MEASURED = {
    "diloco_learner_loss": (LOSS, "Training loss"),
    "diloco_learner_anchor_loss": (EVAL_LOSS, "Validation loss of the anchor, measured by this learner"),
    "diloco_learner_stall_seconds": (STALL, "Time the training thread spent for the run"),
}


def exposition(status: Status | None) -> bytes:
    """Return the text of a scrape; `status` is None if the syncer does not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Run(status))
    return generate_latest(registry)


class _Run(Collector):
    def __init__(self, status: Status | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield GaugeMetricFamily("diloco_up", "Whether the syncer answers", value=float(status is not None))
        if status is None:
            return
        for name, (key, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=status[key])
        for name, (key, text) in _GAUGES.items():
            if status[key] is not None:
                yield GaugeMetricFamily(name, text, value=status[key])
        yield from (_ledger(status), _fragments(status), _phases(status))
        yield from _learners(status)


def _ledger(status: Status) -> Metric:
    family = GaugeMetricFamily("diloco_ledger_token_fragments", "Token x fragment, by fate", labels=["fate"])
    ledger = status["ledger"]
    for fate in ("seen", "merged", "pending"):
        family.add_metric([fate], ledger[fate])
    for cause, tokens in ledger["discarded"].items():
        family.add_metric([f"discarded_{cause}"], tokens)
    return family


def _fragments(status: Status) -> Metric:
    family = GaugeMetricFamily("diloco_fragment_version", "Newest version", labels=["fragment"])
    for p, version in enumerate(status["versions"]):
        family.add_metric([str(p)], version)
    return family


def _phases(status: Status) -> Metric:
    family = GaugeMetricFamily("diloco_learners", "Learners by phase", labels=["phase"])
    for phase, number in sorted(Counter(learner["phase"] for learner in status["learners"]).items()):
        family.add_metric([phase], number)
    return family


def _learners(status: Status) -> Iterator[Metric]:
    known = [(name, text, lambda one, key=key: one[key]) for name, (key, text) in _OF_LEARNER.items()]
    known += [(name, text, lambda one, key=key: one["metrics"].get(key)) for name, (key, text) in _MEASURED.items()]
    for name, text, value_of in known:
        family = GaugeMetricFamily(name, text, labels=["learner"])
        for learner in status["learners"]:
            if (value := value_of(learner)) is not None:
                family.add_metric([learner["id"]], value)
        yield family
