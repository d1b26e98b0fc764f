"""The processes of one run of the comparison with other packages, in a network namespace of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.bench import report
from tests.bench.far_link import delete, make, within
from tests.bench.peer_learner import NUM_FRAGMENTS, OVERLAP, SYNC_EVERY

OURS = "lightning_diloco"
NAMESPACE = "diloco-peers"
LEARNER = Path(__file__).with_name("peer_learner.py")
START_S, LOOK_S = 120.0, 0.02
LIGHTHOUSE = "127.0.0.1:29510"


class Fleet:
    """Processes of one run of a package, in the namespace; all of them are killed at the end.

    Args:
        package: the package.
        python: interpreter of its environment.
        root: an empty folder.
        learners: options of each learner, except rank, folder and meeting.
    """

    def __init__(self, package: str, python: Path, root: Path, learners: Sequence[Mapping[str, Any]]) -> None:
        self._package, self._python, self._root, self._learners = package, python, root, learners
        self._processes: list[subprocess.Popen[bytes]] = []
        self.learners: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        meeting, env = self._meet()
        for rank, more in enumerate(self._learners):
            folder = self._root / str(rank)
            folder.mkdir()
            given = {
                "rank": rank,
                "num_learners": len(self._learners),
                "folder": str(folder),
                "meeting": meeting,
                **more,
            }
            argv = [str(self._python), str(LEARNER), self._package, json.dumps(given)]
            self.learners.append(self._start(f"learner{rank}", argv, DILOCO_LEARNER=f"l{rank}", **env))
            if self._package == "hivemind":
                self._until(Path(meeting).exists)  # the second learner dials the first

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            kill(process)

    def clock(self, rank: int = 0) -> list[tuple[float, bool]]:
        """Return the ends of a learner's steps in unix seconds, and whether an exchange landed in each."""
        path = self._root / str(rank) / "clock"
        values = array("d")
        data = path.read_bytes() if path.exists() else b""
        values.frombytes(data[: len(data) // 16 * 16])
        return [(at_s, landed == 1.0) for at_s, landed in zip(values[::2], values[1::2], strict=True)]

    def until_step(self, num_steps: int, within_s: float) -> int:
        """Wait until the first learner has made this number of steps, or for a time; return the loopback's bytes."""
        self._until(lambda: len(self.clock()) >= num_steps, within_s)
        return self.loopback_bytes()

    def loopback_bytes(self) -> int:
        """Return the bytes that the namespace's loopback device has sent."""
        lines = Path(f"/proc/{self.learners[0].pid}/net/dev").read_text().splitlines()
        (words,) = (line.split() for line in lines if line.strip().startswith("lo:"))
        return int(words[9])

    def losses(self) -> list[float]:
        """Wait for all learners, and return the loss of each."""
        for process in self.learners:
            if process.wait(600):
                raise RuntimeError(f"a learner of {self._package} failed:\n{self._logs()}")
        return [float((self._root / str(rank) / "loss").read_text()) for rank in range(len(self.learners))]

    def _meet(self) -> tuple[str, dict[str, str]]:
        """Start the rendezvous of a package's learners; return its address, and variables for the learners."""
        if self._package == "torchft":
            options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
            program = self._python.with_name("torchft_lighthouse")
            self._start("lighthouse", [str(program), "--bind", LIGHTHOUSE, *options])
            return f"http://{LIGHTHOUSE}", {"GLOO_SOCKET_IFNAME": "lo"}
        if self._package == OURS:
            run_dir = self._root / "run"
            given = {"sync-every": SYNC_EVERY, "num-fragments": NUM_FRAGMENTS, "overlap": OVERLAP}
            options = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
            argv = ["-m", "lightning_diloco.cli.main", "syncer", "--run-dir", str(run_dir), "--expect", "2", *options]
            self._start("syncer", [str(self._python), *argv, "--listen", "127.0.0.1:0"])
            self._until((run_dir / "join").exists)
            return "", {"DILOCO_JOIN": (run_dir / "join").read_text().strip()}
        return str(self._root / "meeting"), {}

    def _start(self, name: str, argv: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        kept |= {"OMP_NUM_THREADS": "1", **env}
        if self._package == OURS:
            kept["PYTHONPATH"] = str(report.ROOT)
        with (self._root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                within(NAMESPACE, argv), stdout=log, stderr=log, env=kept, cwd=self._root, start_new_session=True
            )
        self._processes.append(process)
        return process

    def _until(self, reached: Any, within_s: float = START_S) -> None:
        end_s = time.monotonic() + within_s
        while not reached() and time.monotonic() < end_s:
            if dead := [process for process in self._processes if process.poll() not in (None, 0, -signal.SIGKILL)]:
                raise RuntimeError(f"{dead[0].args} failed:\n{self._logs()}")
            time.sleep(LOOK_S)

    def _logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self._root.glob("*.log")))


@contextlib.contextmanager
def namespace() -> Iterator[None]:
    """Make NAMESPACE, after deleting one that was left behind; at the end, delete it with all of its processes."""
    _delete_namespace()
    make(NAMESPACE)
    try:
        yield
    finally:
        _delete_namespace()


def _delete_namespace() -> None:
    left = subprocess.run(["ip", "netns", "pids", NAMESPACE], capture_output=True, text=True, check=False).stdout
    for pid in left.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    delete(NAMESPACE)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started with SIGKILL, if it still runs."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        for one in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
