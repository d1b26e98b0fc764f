"""Where the run is that this learner joins, as it was told, and how its data is split there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lightning_diloco.config import LearnerConfig
from lightning_diloco.learner.join import reached
from lightning_diloco.learner.rotation import Followed
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection


def given_address(learner: LearnerConfig) -> JoinAddress | None:
    """Of a run that others have started; None: this learner starts one."""
    text = learner.join or os.environ.get("DILOCO_JOIN")
    return JoinAddress.parse(text) if text else None


def given_run_dir() -> Path | None:
    """Its run directory, if it is on this machine; None: not known."""
    folder = os.environ.get("DILOCO_RUN_DIR")
    return Path(folder) if folder else None


def agreed_parts(
    learner: LearnerConfig, *, connect: Callable[[JoinAddress], Connection] = FlightConnection
) -> int | None:
    """How many parts the data has in the run that this learner will join, before it does; None: it is not split.

    Args:
        learner: its options.
        connect: makes the connection.

    Raises:
        JoinError: the syncer cannot be reached.
        RunOverError: the run has ended.
        AuthError: wrong token or certificate.
    """
    if (address := given_address(learner)) is None:
        return None  # a run that this learner begins
    folder = given_run_dir()
    connection = Followed(connect, address, None if folder is None else folder / "join")
    try:
        parts = reached(connection.status, address, given_run_dir())["config"]["data_parts"]
    finally:
        connection.close()
    return None if parts is None else int(parts)
