"""Real processes, each in its own process group; none of them outlives its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from lightning_diloco.errors import RestoringError, TransportError
from lightning_diloco.transport.address import JoinAddress, read_join_file, split_host_port
from lightning_diloco.transport.faults import FaultProxy
from lightning_diloco.transport.flight import FlightConnection

HERE = Path(__file__).parent
DEADLINE_S = 180.0


def until(condition: Callable[[], Any], what: str, processes: Processes | None = None) -> Any:
    """Wait until a call returns a true value, and return it; a call to a busy syncer is repeated."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := _if_reached(condition)):
        logs = processes.logs() if processes and time.monotonic() >= deadline_s else ""
        assert time.monotonic() < deadline_s, f"still waiting for: {what}\n{logs}"
        time.sleep(0.05)
    return found


def _if_reached(condition: Callable[[], Any]) -> Any:
    try:
        return condition()
    except TransportError:
        return None


class Processes:
    """A syncer and learners on one run directory.

    Args:
        root: where run directory, outputs and logs go.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.run_dir = root, root / "run"
        self.stop_file = root / "stop"
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, *argv: object, python: str = sys.executable, **env: str) -> subprocess.Popen[bytes]:
        own = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        own |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(HERE.parents[1]), **env}
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [python, *map(str, argv)],
                stdout=log,
                stderr=log,
                env=own,
                cwd=self.root,
                start_new_session=True,
            )
        self._running.append((name, process))
        return process

    def syncer(self, expect: int | None = None, **options: object) -> subprocess.Popen[bytes]:
        """Start the syncer, and wait until it can be joined."""
        join = self.run_dir / "join"
        before = join.stat().st_mtime_ns if join.exists() else None
        given = json.dumps({"expect": expect, **options})
        process = self.start("syncer", HERE / "syncer.py", self.run_dir, given)
        until(lambda: join.exists() and join.stat().st_mtime_ns != before, "the join file", self)
        return process

    def learner(
        self,
        name: str,
        through: FaultProxy | None = None,
        *,
        deadline_s: float = 1.0,
        verdict: Path | None = None,
        **env: str,
    ) -> subprocess.Popen[bytes]:
        """Start a learner.

        Args:
            name: learner id.
            through: a bad network; calls on it have the deadline `deadline_s`.
            deadline_s: see `through`.
            verdict: a file that it waits for before it reports the loss of the final anchor.
            env: environment variables.
        """
        address, patience = self.address, ()
        if through is not None:
            host, port = split_host_port(through.address)
            address, patience = replace(address, host=host, port=port), ("--deadline-s", deadline_s, "--drain-s", 120.0)
        join = address.join_string()
        arguments = ("--out", self.root / f"{name}.json", "--until", self.stop_file, "--seed", sum(name.encode()))
        if verdict is not None:
            patience += ("--verdict", verdict)
        env = {"DILOCO_JOIN": join, "DILOCO_LEARNER": name, **env}
        return self.start(name, HERE / "learner.py", *arguments, *patience, **env)

    def alone(self, **changed: object) -> subprocess.Popen[bytes]:
        """Start a learner without a run to join."""
        options = json.dumps({"sync_every": 12, "num_fragments": 4, "lease_s": 3.0, **changed})
        arguments = ("--out", self.root / "alone.json", "--until", self.stop_file, "--options", options)
        return self.start("alone", HERE / "learner.py", *arguments)

    def trainer(self, name: str, *arguments: object, **env: str) -> subprocess.Popen[bytes]:
        """Start a Trainer, alone unless DILOCO_JOIN is set; rank r writes <name>.<r>.json."""
        (self.root / name).mkdir()
        return self.start(name, HERE / "trainer.py", "--out", self.root / name / "held", *arguments, **env)

    def ranks_held(self, name: str) -> list[dict[str, Any]]:
        """Return the values that the ranks of a Trainer held at its end."""
        return [json.loads(path.read_text()) for path in sorted((self.root / name).glob("held.*.json"))]

    def held(self, name: str) -> dict[str, Any]:
        """Return the values that a learner held at its end."""
        return json.loads((self.root / f"{name}.json").read_text())

    def status(self) -> dict[str, Any]:
        """Return the status of the syncer; wait while it is being restored."""
        connection, until_s = FlightConnection(self.address), time.monotonic() + DEADLINE_S
        try:
            while True:
                with suppress(RestoringError):
                    return connection.status()
                assert time.monotonic() < until_s, "the syncer restores for too long"
                time.sleep(0.05)
        finally:
            connection.close()

    @property
    def address(self) -> JoinAddress:
        return read_join_file(self.run_dir / "join")

    def until_commits(self, more: int) -> dict[str, Any]:
        """Wait for this number of further commits; return the status then."""
        wanted = self.status()["num_commits"] + more
        return until(lambda: (s := self.status())["num_commits"] >= wanted and s, f"{wanted} commits", self)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.root.glob("*.log")))

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process; return its exit code."""
        until(lambda: process.poll() is not None, "the end of a process", self)
        assert process.returncode is not None
        if process.returncode:
            print(self.logs())  # a test that did not expect this shows it
        return process.returncode

    def kill_all(self) -> None:
        for _, process in self._running:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):  # torchrun's lead their own groups
                    child.kill()
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
