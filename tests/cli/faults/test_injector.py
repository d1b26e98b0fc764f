"""Faults on stand-in processes: they are applied, ended, skipped and logged."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.faults.injector import FaultInjector
from lightning_diloco.cli.faults.schedule import Fault
from lightning_diloco.cli.local.fleet import Command, Fleet
from lightning_diloco.transport.address import JoinAddress

STEPPING: dict[str, Any] = {"learners": [{"step": 1}]}
SLEEP = (sys.executable, "-ISc", "import time; time.sleep(60)")
END = (sys.executable, "-ISc", "")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(max_restarts=5, say=lambda text: None) as fleet:
        for name in ("l0", "syncer"):
            fleet.start(Command(name=name, argv=SLEEP, log_path=tmp_path / name / "log.txt"))
        yield fleet


def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """Return the letter of a process's state: T stopped, Z zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Run:
    """An injector with a clock that is set by hand."""

    def __init__(self, tmp_path: Path, fleet: Fleet, *faults: Fault) -> None:
        self.now_s, self.fleet, self.status = 1000.0, fleet, STEPPING
        self.path = tmp_path / "chaos" / "faults.jsonl"
        self.meddler = FaultInjector(iter(faults), self.path, clock=lambda: self.now_s)

    def at(self, since_s: float) -> None:
        self.now_s = 1000.0 + since_s
        self.meddler(self.fleet, self.status)

    def log(self) -> list[tuple[str, int]]:
        lines = map(json.loads, self.path.read_text().splitlines())
        return [(line["what"], line["number"]) for line in lines]


def fault(number: int, kind: Any, at_s: float = 1.0, lasts_s: float = 0.0, target: str = "l0", **options: Any) -> Fault:
    return Fault(number=number, at_s=at_s, kind=kind, target=target, lasts_s=lasts_s, **options)


def test_nothing_happens_before_the_first_step(tmp_path: Path, fleet: Fleet) -> None:
    run = Run(tmp_path, fleet, fault(1, "kill", at_s=0.0))
    with run.meddler:
        for status in (None, {"learners": []}, {"learners": [{"step": 0}]}):
            run.meddler(fleet, status)
        assert run.log() == []
        run.at(0.0)
        assert run.log() == [("begin", 1)]


@pytest.mark.parametrize(("kind", "target"), [("kill", "l0"), ("syncer", "syncer")])
def test_a_killed_process_is_gone_and_comes_back(tmp_path: Path, fleet: Fleet, kind: str, target: str) -> None:
    run, pid = Run(tmp_path, fleet, fault(1, kind, target=target)), fleet.pid(target)
    with run.meddler:
        run.at(0.0)
        run.at(1.0)
        until(lambda: fleet.watch() or fleet.pid(target) != pid)
    assert fleet.outcome(target) == "running"
    assert json.loads(run.path.read_text())["pid"] == pid


def test_a_shard_is_killed_by_the_pid_in_the_status_once_and_skipped_while_it_is_away(
    tmp_path: Path, fleet: Fleet
) -> None:
    shard = subprocess.Popen(SLEEP)
    faults = [fault(n, "shard", at_s=n, target=f"shard-{k}") for n, k in ((1, 1), (2, 1), (3, 2))]
    run = Run(tmp_path, fleet, *faults)
    run.status = STEPPING | {
        "shards": [{"shard": 1, "pid": shard.pid, "away_s": None}, {"shard": 2, "pid": shard.pid, "away_s": 2.0}]
    }
    with run.meddler:
        run.at(0.0)
        run.at(1.0)
        assert shard.wait(10.0) == -signal.SIGKILL
        run.status = STEPPING | {"shards": []}
        run.at(2.0)
        run.at(3.0)
    assert run.log() == [("begin", 1), ("skip", 2), ("skip", 3)]
    assert fleet.outcome("syncer") == "running"


def test_a_stopped_process_continues_after_its_duration(tmp_path: Path, fleet: Fleet) -> None:
    run, pid = Run(tmp_path, fleet, fault(1, "stop", lasts_s=5.0)), fleet.pid("l0")
    with run.meddler:
        run.at(0.0)
        run.at(1.0)
        until(lambda: state_of(pid) == "T")
        run.at(5.9)
        assert run.log() == [("begin", 1)]
        run.at(6.0)
        until(lambda: state_of(pid) != "T")
    assert run.log() == [("begin", 1), ("end", 1)]


def test_faults_that_last_beyond_the_end_are_ended(tmp_path: Path, fleet: Fleet) -> None:
    run, pid = Run(tmp_path, fleet, fault(1, "stop", lasts_s=1e9)), fleet.pid("l0")
    with run.meddler:
        run.at(0.0)
        run.at(1.0)
        until(lambda: state_of(pid) == "T")
    until(lambda: state_of(pid) != "T")


def test_a_process_killed_while_stopped_does_not_affect_its_successor(tmp_path: Path, fleet: Fleet) -> None:
    faults = [fault(1, "stop", lasts_s=5.0), fault(2, "kill", at_s=2.0)]
    run, pid = Run(tmp_path, fleet, *faults), fleet.pid("l0")
    with run.meddler:
        for since_s in (0.0, 1.0, 2.0):
            run.at(since_s)
        until(lambda: fleet.watch() or fleet.pid("l0") != pid)
        run.at(6.0)
    assert run.log() == [("begin", 1), ("begin", 2), ("end", 1)]
    os.kill(fleet.pid("l0"), signal.SIG_DFL)


def test_a_fault_without_a_target_is_skipped(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start(Command(name="done", argv=END, log_path=tmp_path / "done" / "log.txt"))
    until(lambda: fleet.watch() or fleet.outcome("done") == "finished")
    faults = [fault(1, "kill", target="done"), fault(2, "stop", lasts_s=9.0), fault(3, "stop", lasts_s=9.0)]
    run = Run(tmp_path, fleet, *faults)
    with run.meddler:
        run.at(0.0)
        run.at(2.0)
    assert run.log() == [("skip", 1), ("begin", 2), ("skip", 3), ("end", 2)]


def test_a_learner_that_has_left_is_spared_until_it_is_back(tmp_path: Path, fleet: Fleet) -> None:
    run, pid = Run(tmp_path, fleet, fault(1, "kill", at_s=1.0), fault(2, "kill", at_s=3.0)), fleet.pid("l0")
    left, back = ({"id": "l0", "step": 9, "phase": phase} for phase in ("left", "stepping"))
    with run.meddler:
        run.at(0.0)
        run.now_s += 2.0
        run.meddler(fleet, {"learners": [left]})
        assert state_of(pid) != "Z"
        run.now_s += 2.0
        run.meddler(fleet, {"learners": [left, back]})
    assert run.log() == [("skip", 1), ("begin", 2)]


@pytest.mark.parametrize("is_half_open", [False, True])
def test_a_cut_network_carries_no_data_until_it_heals(tmp_path: Path, fleet: Fleet, is_half_open: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = JoinAddress("127.0.0.1", server.getsockname()[1], "run", "secret", "ab" * 32)
        run = Run(tmp_path, fleet, fault(1, "cut", lasts_s=3.0, is_half_open=is_half_open))
        with run.meddler:
            through = run.meddler.via("l0", address)
            assert (through.run, through.token, through.fingerprint) == ("run", "secret", "ab" * 32)
            assert through.port != address.port
            assert carries(server, through)
            run.at(0.0)
            run.at(1.0)
            assert not carries(server, through)
            run.at(4.0)
            until(lambda: carries(server, through))


def carries(server: socket.socket, through: JoinAddress) -> bool:
    """Return whether a new connection through the proxy reaches the server."""
    server.settimeout(0.2)
    try:
        with socket.create_connection((through.host, through.port), timeout=1.0):
            server.accept()[0].close()
    except OSError:
        return False
    return True


def test_a_slow_network_is_fast_again_afterwards(tmp_path: Path, fleet: Fleet) -> None:
    run = Run(tmp_path, fleet, fault(1, "slow", lasts_s=3.0, delay_s=0.1, rate_bps=1e6))
    with run.meddler:
        run.meddler.via("l0", JoinAddress("127.0.0.1", 1, "run", "secret", "0" * 64))
        proxy = run.meddler._proxies["l0"]
        seen = []
        for since_s in (0.0, 1.0, 4.0):
            run.at(since_s)
            seen.append((proxy.delay_s, proxy.rate_bps))
    assert seen == [(0.0, None), (0.1, 1e6), (0.0, None)]


def test_faults_after_the_end_are_not_applied(tmp_path: Path, fleet: Fleet) -> None:
    faults = (fault(number, "stop", at_s=10.0 * number, lasts_s=1.0) for number in itertools.count(1))
    run = Run(tmp_path, fleet)
    run.meddler = FaultInjector(faults, run.path, clock=lambda: run.now_s)
    with run.meddler:
        run.at(0.0)
        run.at(15.0)
    assert run.log() == [("begin", 1), ("end", 1)]
