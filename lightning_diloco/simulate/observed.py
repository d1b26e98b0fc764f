"""The part of a simulated fleet that the invariants read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lightning_diloco.config import RunConfig
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.simulate.disk import Disk
from lightning_diloco.simulate.process import SimulatedLearner


class Observed(Protocol):
    """A fleet (`fleet.Fleet`) at one moment."""

    config: RunConfig
    now_s: float
    syncer: SyncerState
    disk: Disk

    @property
    def learners(self) -> Mapping[str, SimulatedLearner]:
        """All processes so far, by session."""

    def story(self) -> str:
        """Return the last events, for the message of a violation."""
