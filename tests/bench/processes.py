"""A run of real processes on this machine: a syncer, learners, and for each learner a proxy that counts its bytes.

1. Learners are `tests/bench/sleeper.py`, an ordinary Trainer that sleeps instead of computing, so two cores are enough.
2. Bytes are counted from a learner's first step to its end, including the drain. The adoption of the anchors before
   that happens once per run and is not counted.
3. The proxies delay by DELAY_S each way, as between cities, so that a link that waits is noticed. Proxies and syncer
   represent the network and another machine, so they run at lower priority than the learners.
4. Processes that still run at the end of a bench are killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_diloco.process.threads import yield_cores
from lightning_diloco.transport.address import JoinAddress, read_join_file, split_host_port
from lightning_diloco.transport.faults import FaultProxy

ROOT = Path(__file__).parents[2]
START_S = 120.0
LIMIT_S = 300.0
LOOK_S = 0.01
DELAY_S = 0.01
STEPPING = "stepping"  # a file in the learner's folder that appears when it may step
MEASURED = "measured.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeper:
    """One learner of a bench.

    Args:
        step_s: sleep time per step.
        num_steps: number of inner steps.
        numel: parameters of the model; equal for all learners.
        width: width of its square matrices.
        blocks: whether to encode and upload on the training thread, as a bad link would.
    """

    step_s: float
    num_steps: int
    numel: int
    width: int = 512
    blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one learner.

    Args:
        steps: per inner step, {"hook_s", "hook_cpu_s", "wall_s", "snapshots", "landings"}: time inside the link at the
            step's end and before the next update, the CPU time of that, time since the last step, and the fragments
            exchanged.
        num_snapshots, num_landings: totals of the run, including the drain.
        bytes_up, bytes_down: bytes at the socket, see rule 2.
    """

    steps: list[dict[str, Any]]
    num_snapshots: int
    num_landings: int
    bytes_up: int
    bytes_down: int

    def exchange_s(self, clock: str = "hook_s") -> list[float]:
        """Return the stall of each complete exchange: its part of the hooks that snapshotted and landed it.

        If a hook serves several exchanges, its time is divided among them, so that it is counted exactly once.

        Args:
            clock: "hook_s", or "hook_cpu_s" for CPU time, which other load does not affect.
        """
        opened: dict[int, float] = {}
        stalls = []
        for step in self.steps:
            part_s = step[clock] / max(1, len(step["landings"]) + len(step["snapshots"]))
            stalls += [opened.pop(p) + part_s for p in step["landings"] if p in opened]
            opened.update(dict.fromkeys(step["snapshots"], part_s))
        return stalls

    def stall_share(self, clock: str = "hook_s") -> float:
        """Return the share of time that the learner spent in hooks; `clock` as above."""
        return sum(step[clock] for step in self.steps) / sum(step["wall_s"] for step in self.steps)


def run(sleepers: Sequence[Sleeper], options: Mapping[str, Any]) -> tuple[list[Measured], dict[str, Any]]:
    """Run the learners to their end.

    Args:
        sleepers: the learners.
        options: explicit options of the run.

    Returns:
        The measurements of each learner, and the run's summary.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        run_dir = folder / "run"
        command = [sys.executable, "-m", "lightning_diloco.cli.main", "syncer", "--run-dir", str(run_dir)]
        command += ["--listen", "127.0.0.1:0", "--expect", str(len(sleepers))]
        command += [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        syncer = stack.enter_context(_process(command, folder, {}, folder / "syncer.out"))
        yield_cores(syncer.pid)
        address = _join_address(run_dir / "join", syncer)
        crew = []
        for k, sleeper in enumerate(sleepers):
            proxy = stack.enter_context(FaultProxy(address.host_port, delay_s=DELAY_S))
            command, environment = _start_of(sleeper, folder / f"l{k}", _through(proxy, address))
            process = stack.enter_context(_process(command, ROOT, environment, folder / f"l{k}.out"))
            crew.append(_Learner(process, proxy, folder / f"l{k}"))
        _yield_cores()
        measured = _await(crew)
        if syncer.wait(timeout=START_S) != 0:
            raise RuntimeError(f"the syncer failed:\n{(folder / 'syncer.out').read_text()[-4000:]}")
        return measured, json.loads((run_dir / "summary.json").read_text())


class _Learner:
    """A learner process with its own proxy."""

    def __init__(self, process: subprocess.Popen[bytes], proxy: FaultProxy, root: Path) -> None:
        self._process, self._proxy, self._root = process, proxy, root
        self._before: tuple[int, int] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process still runs; raises if it failed."""
        if self._before is None and (self._root / STEPPING).exists():
            self._before = self._counted
        returned = self._process.poll()
        if returned:
            raise RuntimeError(f"a learner failed:\n{self._root.with_suffix('.out').read_text()[-4000:]}")
        return returned is None

    @property
    def measured(self) -> Measured:
        """Return its measurements, after its end."""
        assert self._before is not None, "a learner that never stepped"
        up, down = (now - before for now, before in zip(self._counted, self._before, strict=True))
        return Measured(bytes_up=up, bytes_down=down, **json.loads((self._root / MEASURED).read_text()))

    @property
    def _counted(self) -> tuple[int, int]:
        return self._proxy.bytes_up, self._proxy.bytes_down


def _await(crew: Sequence[_Learner]) -> list[Measured]:
    until_s = time.monotonic() + LIMIT_S
    while sum(learner.is_running for learner in crew):
        if time.monotonic() > until_s:
            raise TimeoutError(f"learners still run after {LIMIT_S:.0f} s")
        time.sleep(LOOK_S)
    return [learner.measured for learner in crew]


def _yield_cores() -> None:
    """Lower the priority of the proxies' threads."""
    for thread in threading.enumerate():
        if thread.name == "fault-proxy" and thread.native_id is not None:
            yield_cores(thread.native_id)


def _start_of(sleeper: Sleeper, root: Path, join: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a learner process."""
    given = json.dumps({**dataclasses.asdict(sleeper), "root": str(root)})
    return [sys.executable, "-m", "tests.bench.sleeper", given], {"DILOCO_JOIN": join, "DILOCO_LEARNER": root.name}


def _through(proxy: FaultProxy, address: JoinAddress) -> str:
    host, port = split_host_port(proxy.address)
    return dataclasses.replace(address, host=host, port=port).join_string()


def _join_address(path: Path, syncer: subprocess.Popen[bytes]) -> JoinAddress:
    until_s = time.monotonic() + START_S
    while not path.exists():
        if syncer.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the syncer wrote no {path}")
        time.sleep(0.05)
    return read_join_file(path)


@contextlib.contextmanager
def _process(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], out: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that is killed at the end of the block."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with out.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env={**inherited, **threads, **environment}, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
