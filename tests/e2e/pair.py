"""Two syncer processes of one run, of which one serves and the other is its standby."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lightning_diloco.errors import TransportError
from lightning_diloco.protocol.syncer.succession import BEFORE_S
from lightning_diloco.transport.address import read_join_file
from lightning_diloco.transport.flight import FlightConnection
from tests.e2e.conftest import HERE, Processes, until

COMMAND = ("-m", "lightning_diloco.cli.main", "syncer")


class Pair:
    """Two syncers of one run, of which one serves; each can be started again with the same command.

    Args:
        processes: the processes to which they belong.
        expect: number of learners.
        options: additional options of the first syncer, at its first start.
    """

    def __init__(self, processes: Processes, expect: int, **options: object) -> None:
        self.processes, self._given = processes, {"expect": expect}
        self.dirs = [processes.run_dir, processes.root / "other"]
        self.running = [processes.syncer(expect, **options)]
        self.running.append(self._start(1))
        until((self.dirs[1] / "join").exists, "the standby", processes)

    def _start(self, which: int, **options: object) -> subprocess.Popen[bytes]:
        given = self._given | options | ({} if which == 0 else {"standby_of": str(self.invitation)})
        return self.processes.start(f"syncer{which}", HERE / "syncer.py", self.dirs[which], json.dumps(given))

    @property
    def invitation(self) -> Path:
        return self.dirs[0] / "standby"

    def restart(self, which: int, **options: object) -> None:
        self.running[which] = self._start(which, **options)

    def kill(self, which: int) -> None:
        """Kill a syncer and its shards at once, like the loss of their machine."""
        shards = psutil.Process(self.running[which].pid).children()
        self.send(which, signal.SIGKILL)
        self.running[which].wait()
        psutil.wait_procs(shards)

    def send(self, which: int, sign: signal.Signals) -> None:
        """Send a signal to a syncer and its shards."""
        for process in (self.running[which], *psutil.Process(self.running[which].pid).children()):
            os.kill(process.pid, sign)

    def address(self, which: int) -> str:
        return read_join_file(self.dirs[which] / "join").host_port

    def status(self, which: int) -> dict[str, Any] | None:
        """Return the status of this syncer; None if it does not serve."""
        connection = FlightConnection(read_join_file(self.dirs[which] / "join"))
        try:
            with suppress(TransportError):
                return connection.status()
            return None
        finally:
            connection.close()

    def until_registered(self, primary: int) -> None:
        """Wait until the other syncer is the standby of this one."""
        wanted = self.address(1 - primary)
        until(
            lambda: (s := self.status(primary)) and s["standby"] and s["standby"]["address"] == wanted,
            f"the standby of {self.dirs[primary]}",
            self.processes,
        )

    def until_in_contact(self) -> None:
        """Wait until learners have been in contact with the primary for long enough to count if the standby dies."""
        enough_s = time.monotonic() + BEFORE_S + 2.0
        until(lambda: time.monotonic() > enough_s, "long contact", self.processes)

    def until_commits(self, which: int, more: int) -> dict[str, Any]:
        first = until(lambda: self.status(which), "a syncer that serves", self.processes)["num_commits"]
        return until(
            lambda: (s := self.status(which)) and s["num_commits"] >= first + more and s, "commits", self.processes
        )
