"""A small engine that follows the contract of `recipes/launch/README.md`, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FOR_EVER_BUT = (0, 2)  # exit codes after which a process is not restarted


class Engine:
    """Starts commands, each in its own process group, and restarts them without limit.

    Args:
        folder: folder in which they write `NAME.log`, and run unless they have another one.
    """

    def __init__(self, folder: Path) -> None:
        self.codes: dict[str, list[int]] = {}
        self._folder = folder
        self._commands: dict[str, tuple[Sequence[str], Mapping[str, str], Path]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> None:
        """Start a command."""
        cwd = cwd or self._folder
        self._commands[name] = command, env, cwd
        own = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env={**own, **env}, cwd=cwd, stdout=log, stderr=log, start_new_session=True
            )

    def look(self) -> bool:
        """Restart processes that have died; return whether all have ended for good."""
        for name, process in self._processes.items():
            if process.poll() is not None and self.codes.get(name, [None])[-1] not in FOR_EVER_BUT:
                self.codes.setdefault(name, []).append(process.returncode)
                if process.returncode not in FOR_EVER_BUT:
                    self.start(name, *self._commands[name])
        return all(self.codes.get(name, [None])[-1] in FOR_EVER_BUT for name in self._commands)

    def has_ended(self, name: str) -> bool:
        """Return whether a process has ended; restarts nothing."""
        return self._processes[name].poll() is not None

    def preempt(self, name: str) -> None:
        """Send SIGTERM."""
        self._processes[name].terminate()

    def kill(self, name: str) -> None:
        """Kill the process and its process group."""
        os.killpg(self._processes[name].pid, signal.SIGKILL)
        self._processes[name].wait()

    def close(self) -> None:
        """Kill all processes that still run."""
        self._commands.clear()
        for name, process in self._processes.items():
            if process.poll() is None:
                self.kill(name)
