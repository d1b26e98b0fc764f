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
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_diloco.process.threads import yield_cores
from lightning_diloco.transport.address import split_host_port
from lightning_diloco.transport.faults import FaultProxy
from tests.e2e.conftest import Processes, until

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


def run(
    sleepers: Sequence[Sleeper],
    options: Mapping[str, Any],
    *,
    delay_s: float = DELAY_S,
    rate_bps: float | None = None,
) -> tuple[list[Measured], dict[str, Any]]:
    """Run the learners to their end.

    Args:
        sleepers: the learners.
        options: explicit options of the run.
        delay_s: delay of each learner's link, each way.
        rate_bps: bits per second of each learner's link in each direction, from its first step on; None: no limit.

    Returns:
        The measurements of each learner, and the run's summary.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name, contextlib.ExitStack() as stack:
        processes = Processes(Path(name))
        stack.callback(processes.kill_all)
        syncer = start_syncer(processes, len(sleepers), options)
        yield_cores(syncer.pid)
        proxies = [stack.enter_context(FaultProxy(processes.address.host_port, delay_s=delay_s)) for _ in sleepers]
        crew = [
            Started(processes, f"l{k}", *one, rate_bps=rate_bps)
            for k, one in enumerate(zip(sleepers, proxies, strict=True))
        ]
        _yield_cores()
        until_s = time.monotonic() + LIMIT_S
        while sum(learner.is_running for learner in crew):
            if time.monotonic() > until_s:
                raise TimeoutError(f"learners still run after {LIMIT_S:.0f} s")
            time.sleep(LOOK_S)
        if any(processes.end(process) for process in (*(learner.process for learner in crew), syncer)):
            raise RuntimeError("a process failed; its log is above")
        return [learner.measured for learner in crew], processes.summary()


def start_syncer(
    processes: Processes,
    expect: int,
    options: Mapping[str, Any],
    module: Sequence[str] = ("lightning_diloco.cli.main",),
) -> subprocess.Popen[bytes]:
    """Start a syncer with these options of the run, and wait until it can be joined.

    Args:
        processes: processes of the run.
        expect: number of learners.
        options: options of the run.
        module: the module that runs `diloco`, followed by its own arguments.
    """
    given = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    own = ("--run-dir", processes.run_dir, "--listen", "127.0.0.1:0", "--expect", expect)
    syncer = processes.start("syncer", "-m", *module, "syncer", *own, *given)
    until((processes.run_dir / "join").exists, "the join file", processes)
    return syncer


class Started:
    """A learner process with its own proxy.

    Args:
        processes: processes of the run.
        name: name of the learner.
        sleeper: what it does.
        proxy: its way to the syncer.
        rate_bps: rate of the proxy from the learner's first step on.
    """

    def __init__(
        self, processes: Processes, name: str, sleeper: Sleeper, proxy: FaultProxy, *, rate_bps: float | None = None
    ) -> None:
        self._proxy, self._rate_bps, self.root = proxy, rate_bps, processes.root / name
        self._before: tuple[int, int] | None = None
        host, port = split_host_port(proxy.address)
        env = {
            "DILOCO_JOIN": dataclasses.replace(processes.address, host=host, port=port).join_string(),
            "DILOCO_LEARNER": name,
        }
        given = json.dumps({**dataclasses.asdict(sleeper), "root": str(self.root)})
        self.process = processes.start(name, "-m", "tests.bench.sleeper", given, **env)

    @property
    def is_running(self) -> bool:
        """Whether the process still runs; from its first step on, its bytes are counted."""
        if self._before is None and (self.root / STEPPING).exists():
            self._before = self._counted
            self._proxy.rate_bps = self._rate_bps
        return self.process.poll() is None

    @property
    def measured(self) -> Measured:
        """Return its measurements, after its end."""
        assert self._before is not None, "a learner that never stepped"
        up, down = (now - before for now, before in zip(self._counted, self._before, strict=True))
        return Measured(bytes_up=up, bytes_down=down, **json.loads((self.root / MEASURED).read_text()))

    @property
    def _counted(self) -> tuple[int, int]:
        return self._proxy.bytes_up, self._proxy.bytes_down


def _yield_cores() -> None:
    """Lower the priority of the proxies' threads."""
    for thread in threading.enumerate():
        if thread.name == "fault-proxy" and thread.native_id is not None:
            yield_cores(thread.native_id)
