"""Finds the run that a learner joins, or starts a syncer for a new run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_diloco.config import LearnerConfig
from lightning_diloco.learner.embedded_syncer import EmbeddedSyncer
from lightning_diloco.learner.join import reached
from lightning_diloco.learner.leftovers import tidy
from lightning_diloco.learner.name import given_address
from lightning_diloco.learner.rotation import RedialingConnection
from lightning_diloco.process.threads import Crew
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Connection
from lightning_diloco.transport.flight import FlightConnection

log = logging.getLogger(__name__)


def given_run_dir() -> Path | None:
    """Return the run directory that this learner was given; None if it was given none."""
    folder = os.environ.get("DILOCO_RUN_DIR")
    return Path(folder) if folder else None


def agreed_parts(
    learner: LearnerConfig, *, connect: Callable[[JoinAddress], Connection] = FlightConnection
) -> int | None:
    """Return the number of data parts of a run, before this learner joins it; None: the run does not split the data.

    Args:
        learner: the learner's options.
        connect: makes the connection to the syncer.

    Raises:
        JoinError: the syncer cannot be reached.
        RunOverError: the run has ended.
        AuthError: wrong token or certificate.
    """
    if (address := given_address(learner)) is None:
        return None  # this learner starts the run
    folder = given_run_dir()
    connection = RedialingConnection(connect, address, None if folder is None else folder / "join")
    try:
        parts = reached(connection.status, address, given_run_dir())["config"]["data_parts"]
    finally:
        connection.close()
    return None if parts is None else int(parts)


class Whereabouts:
    """The syncer of a learner: at the address that the learner was given, or started by the learner on this machine.

    Args:
        learner: the learner's options.
        root_dir: folder for the run directory of a syncer that the learner starts; None: the run directory is
            temporary, and removed when the run has finished.
        crew: runs the thread that restarts this syncer if it ends too early.
    """

    def __init__(self, learner: LearnerConfig, root_dir: Path | None, crew: Crew) -> None:
        self._learner, self._root_dir, self._crew = learner, root_dir, crew
        self._embedded: EmbeddedSyncer | None = None

    def find(self, is_needed: Callable[[], bool]) -> JoinAddress:
        """Return the syncer's address. Starts a syncer if this learner was given no address.

        Args:
            is_needed: returns whether this learner still takes part; see `EmbeddedSyncer.watch`.
        """
        if (address := given_address(self._learner)) is not None:
            return address
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if self._root_dir is None:
            run_dir = Path(tempfile.mkdtemp(prefix=f"diloco-{name}-"))
        else:
            run_dir = self._root_dir / "diloco" / name
            tidy(run_dir.parent)
        self._embedded = EmbeddedSyncer(run_dir)
        self._crew.start("syncer", partial(self._embedded.watch, self._crew.stopping, is_needed))
        address = self._embedded.address
        log.warning(
            "started a syncer for this run at %s; others join it with DILOCO_JOIN=$(cat %s)", address, run_dir / "join"
        )
        return address

    @property
    def own_run_dir(self) -> Path | None:
        """Run directory of the syncer that this learner has started; None if it has started none."""
        return self._embedded.run_dir if self._embedded else None

    @property
    def join_file(self) -> Path | None:
        """Path of the file with the join address; None if the run directory is unknown here."""
        folder = self.own_run_dir or given_run_dir()
        return None if folder is None else folder / "join"

    def let_go(self, *, was_joined: bool, is_last: bool, is_drained: bool) -> None:
        """Release the syncer, if this learner has started it.

        A temporary run directory is removed if the syncer has ended and nothing in it is needed.

        Args:
            was_joined: this learner took part.
            is_last: no other learner takes part.
            is_drained: all of this learner's work is merged.
        """
        if self._embedded is None:
            return
        has_ended = self._embedded.let_go(was_joined=was_joined, is_last=is_last)
        is_kept = was_joined and not (is_last and is_drained)
        if self._root_dir is None and has_ended and not is_kept:
            shutil.rmtree(self._embedded.run_dir, ignore_errors=True)
