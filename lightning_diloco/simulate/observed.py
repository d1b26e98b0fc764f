"""The part of a simulated fleet that the invariants read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lightning_diloco.config import RunConfig
from lightning_diloco.simulate.learner import SimulatedLearner
from lightning_diloco.simulate.settings import Network
from lightning_diloco.simulate.syncer import SimulatedSyncer


class Observed(Protocol):
    """A fleet (`fleet.Fleet`) at one moment."""

    config: RunConfig
    network: Network

    @property
    def now_s(self) -> float:
        """Current simulated time."""

    @property
    def syncer(self) -> SimulatedSyncer:
        """The syncer."""

    @property
    def learners(self) -> Mapping[str, SimulatedLearner]:
        """All processes so far, by session."""

    def story(self) -> str:
        """Return the last events, for the message of a violation."""
