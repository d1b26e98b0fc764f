"""Applies a schedule of faults to the processes of a local run and logs each of them.

1. Every learner dials its own proxy. TLS passes through the proxy, and the learner pins the syncer's certificate. It
   dials shards without a proxy.
2. The schedule starts with the first inner step of the run. It runs in the main thread, so that signals reach only
   processes of this run.
3. A fault is skipped if its learner has left or ended, or if a fault of the same kind still lasts there.
4. RUN_DIR/chaos/faults.jsonl has a line for each "begin", "end" and "skip", with the time, the process and the fault.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_diloco.cli.faults.schedule import SHARD, Fault
from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.local.fleet import Fleet
from lightning_diloco.transport.address import JoinAddress, split_host_port
from lightning_diloco.transport.faults import FaultProxy

Undo = Callable[[], None]


class FaultInjector:
    """Applies one schedule once. Leaving the `with` block ends all lasting faults.

    Args:
        faults: faults in time order.
        path: path of the fault log.
        clock: unix seconds.
    """

    def __init__(self, faults: Iterator[Fault], path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._faults = faults
        self._next = next(faults, None)
        self._path = path
        self._clock = clock
        self._began_s: float | None = None
        self._lasting: dict[tuple[str, str], tuple[Fault, int, Undo]] = {}
        self._proxies: dict[str, FaultProxy] = {}
        self._phases: dict[str, str] = {}
        self._shards: dict[str, int] = {}

    def __enter__(self) -> FaultInjector:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for key in list(self._lasting):
            self._end(key)
        for proxy in self._proxies.values():
            proxy.stop()

    def via(self, name: str, address: JoinAddress) -> JoinAddress:
        """Start a proxy for this learner and return the address to dial."""
        proxy = self._proxies[name] = FaultProxy(address.host_port).start()
        host, port = split_host_port(proxy.address)
        return dataclasses.replace(address, host=host, port=port)

    def __call__(self, fleet: Fleet, status: Status | None) -> None:
        """Apply and end the faults that are due."""
        now_s = self._clock()
        if status is not None:
            self._phases = {learner.get("id"): learner.get("phase") for learner in status["learners"]}
            shards = [shard for shard in status.get("shards", ()) if shard["away_s"] is None]
            self._shards = {f"{SHARD}{shard['shard']}": shard["pid"] for shard in shards}
        if self._began_s is None:
            if status is None or not any(learner["step"] > 0 for learner in status["learners"]):
                return
            self._began_s = now_s
        since_s = now_s - self._began_s
        for key, (fault, _, _) in list(self._lasting.items()):
            if since_s >= fault.at_s + fault.lasts_s:
                self._end(key)
        while self._next is not None and since_s >= self._next.at_s:
            self._begin(fleet, self._next)
            self._next = next(self._faults, None)

    def _begin(self, fleet: Fleet, fault: Fault) -> None:
        key = (fault.target, fault.kind)
        if key in self._lasting:
            return self._note("skip", fault, why=f"a fault of the same kind still lasts at {fault.target}")
        if self._phases.get(fault.target) == "left":  # a restarted learner would look for a run that may be over
            return self._note("skip", fault, why=f"{fault.target} has left")
        if fault.kind == "shard":
            pid = self._shards.pop(fault.target, None)
        elif fleet.outcome(fault.target) != "running":
            return self._note("skip", fault, why=f"{fault.target} has ended")
        else:
            pid = fleet.pid(fault.target)
        if pid is None:
            return self._note("skip", fault, why=f"{fault.target} is away")
        try:
            undo = self._apply(fault, pid, fleet)
        except ProcessLookupError:
            return self._note("skip", fault, why=f"{fault.target} is being restarted")
        self._note("begin", fault, pid=pid)
        if undo is not None:
            self._lasting[key] = (fault, pid, undo)

    def _apply(self, fault: Fault, pid: int, fleet: Fleet) -> Undo | None:
        """Apply a fault and return the function that ends it."""
        match fault.kind:
            case "kill" | "syncer":
                os.killpg(pid, signal.SIGKILL)
                return None
            case "shard":  # in the group of the syncer
                os.kill(pid, signal.SIGKILL)
                return None
            case "stop":
                os.killpg(pid, signal.SIGSTOP)
                return lambda: _go_on(fleet, fault.target, pid)
            case "cut":
                proxy = self._proxies[fault.target]
                (proxy.freeze if fault.is_half_open else proxy.cut)()
                return proxy.heal
            case "slow":
                proxy = self._proxies[fault.target]
                proxy.delay_s, proxy.rate_bps = fault.delay_s, fault.rate_bps
                return lambda: _unslow(proxy)

    def _end(self, key: tuple[str, str]) -> None:
        fault, pid, undo = self._lasting.pop(key)
        undo()
        self._note("end", fault, pid=pid)

    def _note(self, what: str, fault: Fault, **more: Any) -> None:
        line = {"t": self._clock(), "what": what, **more, **dataclasses.asdict(fault)}
        with self._path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def _go_on(fleet: Fleet, name: str, pid: int) -> None:
    """Continue a stopped process, unless it was killed and replaced meanwhile."""
    if fleet.pid(name) == pid and fleet.outcome(name) == "running":
        os.killpg(pid, signal.SIGCONT)


def _unslow(proxy: FaultProxy) -> None:
    proxy.delay_s, proxy.rate_bps = 0.0, None
