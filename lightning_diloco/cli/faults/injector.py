"""Carries out a schedule of faults against the processes of a local run, and writes down what it did.

1. Every learner dials a proxy of its own; the certificate it pins is still the syncer's, TLS passes through.
2. The schedule begins with the first inner step of the run; it is looked at from the main thread, never in one of its
   own: signals go to processes that are certainly still ours.
3. A fault that finds nothing to hit (its learner has left or ended, or suffers from the same kind already) is skipped.
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

from lightning_diloco.cli.faults.schedule import Fault
from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.local.fleet import Fleet
from lightning_diloco.transport.address import JoinAddress, split_host_port
from lightning_diloco.transport.faults import FaultProxy

Undo = Callable[[], None]


class FaultInjector:
    """One schedule, carried out once; leaving the `with` block takes back what still lasts.

    Args:
        faults: in the order of time.
        path: log of what was done.
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
        """Where this learner dials: its proxy, which is started for it."""
        proxy = self._proxies[name] = FaultProxy(address.host_port).start()
        host, port = split_host_port(proxy.address)
        return dataclasses.replace(address, host=host, port=port)

    def __call__(self, fleet: Fleet, status: Status | None) -> None:
        """Do what is due."""
        now_s = self._clock()
        if status is not None:
            self._phases = {learner.get("id"): learner.get("phase") for learner in status["learners"]}
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
            return self._note("skip", fault, why=f"{fault.target} suffers from the same kind already")
        if self._phases.get(fault.target) == "left":  # started again, it would look for a run that may be over
            return self._note("skip", fault, why=f"{fault.target} has left")
        if fleet.outcome(fault.target) != "running":
            return self._note("skip", fault, why=f"{fault.target} has ended")
        pid = fleet.pid(fault.target)
        try:
            undo = self._apply(fault, pid, fleet)
        except ProcessLookupError:
            return self._note("skip", fault, why=f"{fault.target} is being started again")
        self._note("begin", fault, pid=pid)
        if undo is not None:
            self._lasting[key] = (fault, pid, undo)

    def _apply(self, fault: Fault, pid: int, fleet: Fleet) -> Undo | None:
        """Make it happen; returns how to take it back."""
        match fault.kind:
            case "kill" | "syncer":
                os.killpg(pid, signal.SIGKILL)
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
    """A process that was killed meanwhile has been replaced, and its group is gone."""
    if fleet.pid(name) == pid and fleet.outcome(name) == "running":
        os.killpg(pid, signal.SIGCONT)


def _unslow(proxy: FaultProxy) -> None:
    proxy.delay_s, proxy.rate_bps = 0.0, None
