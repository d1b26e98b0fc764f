"""Reports a takeover to the former primary, repeatedly."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from lightning_diloco.errors import RemoteError, TransportError
from lightning_diloco.syncer.front import Front
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.reign import begin_reign, reign
from lightning_diloco.syncer.standby.requests import TookOver
from lightning_diloco.syncer.standby.source import Source

log = logging.getLogger(__name__)

AGAIN_S = 2.0
TELLING_S = 6.0


class Telling:
    """A thread that repeatedly reports a takeover to the former primary.

    The former primary may be killed before it has stored the report, so the thread ends only when the other one is a
    standby of this run. If the other one has taken over since, it ignores the report and sends its own.

    Args:
        former: the former primary.
        front: the server of this syncer.
        run_dir: RUN_DIR of this syncer.
        last_lsn: last record of its log, before it decides anything.
    """

    def __init__(self, former: Invitation, front: Front, run_dir: Path, last_lsn: int) -> None:
        self._former, self._front = former, front
        self._reign, self._lsn = reign(run_dir), begin_reign(run_dir, last_lsn)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-telling", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread after its present call; idempotent."""
        self._ended.set()
        self._thread.join(TELLING_S)

    def _run(self) -> None:
        source = Source(self._former)
        while not self._ended.is_set():
            try:
                source.took_over(TookOver(self._front.address.host_port, self._reign, self._lsn))
            except TransportError:  # it is away, or a standby already
                pass
            except RemoteError as error:
                log.warning("the takeover could not be reported to the former primary: %s", error)
                break
            self._ended.wait(AGAIN_S)
        source.close()
