"""Options of a syncer process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_diloco.syncer.standby.invitation import Invitation


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerOptions:
    """Options of a syncer process.

    Args:
        run_dir: RUN_DIR.
        listen: host:port; port 0 for any free port.
        expect: number of learners that the first step waits for; the run ends when as many have finished.
        embedded_by: process id of the learner that started this syncer; the syncer then ends with the last learner.
        run_options: explicit `RunConfig` options.
        reseed: open an incomplete run directory although learners may know the run.
        record_contributions: also keep the received bytes, for replay.
        standby_of: the primary that this syncer follows, until it takes over; None: it serves the run.
        takes_over: serve the run now, although this directory is a standby's.
        num_shards: number of processes that share the fragments (`shards/`); None: as before, 1 for a new run.
        shards_elsewhere: the other shards are started by the user, on other machines.
    """

    run_dir: Path
    listen: str = "127.0.0.1:0"
    expect: int | None = None
    embedded_by: int | None = None
    run_options: dict[str, Any] = field(default_factory=dict)
    reseed: bool = False
    record_contributions: bool = False
    standby_of: Invitation | None = None
    takes_over: bool = False
    num_shards: int | None = None
    shards_elsewhere: bool = False
