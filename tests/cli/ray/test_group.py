"""The hosts of a learner start their processes together, whichever of them dies. These tests do not need Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lightning_diloco.cli.local.fleet import Command
from lightning_diloco.cli.ray import group
from lightning_diloco.cli.ray.files import Desk, Order, host_names, make_folder
from lightning_diloco.cli.ray.group import FirstHost, NoMeetingError, OtherHost
from tests.cli.ray.test_keeper import DEADLINE_S, keepers_of, until

HOSTS = ("l0", "l0.1")
BEGAN = (
    "import os, signal, sys, time\n"
    "names = ('MASTER_ADDR', 'MASTER_PORT', 'NODE_RANK', 'DILOCO_NUM_HOSTS')\n"
    "address, port, rank, hosts = map(os.environ.get, names)\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    "print(os.getpid(), address, port, rank, hosts, flush=True)\n"
)
TRAIN = f"{BEGAN}time.sleep(600)"
QUICK = "from lightning_diloco.cli.ray import group, keeper; group.GRACE_S = 0.5; keeper.main()"


class Learner:
    """A learner of two hosts, which are keepers on this machine."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        make_folder(run_dir)
        self.desks = {name: Desk(run_dir, name) for name in HOSTS}

    def order(self, code: str, **changed: object) -> None:
        command = Command(name="l0", argv=(sys.executable, "-ISc", code), log_path=self.run_dir / "log.txt")
        order = replace(Order.of(command, None, "known"), num_hosts=2)
        self.desks["l0"].write_order(replace(order, **changed))  # type: ignore[arg-type]

    def start(self, name: str, mark: str) -> None:
        words = ("-c", QUICK, self.run_dir, name, mark, "127.0.0.1")
        subprocess.run([sys.executable, *map(str, words)], check=True, timeout=DEADLINE_S)

    def run(self, code: str) -> None:
        """Wait until the processes of this order have begun on both hosts."""
        self.order(code)
        for name in HOSTS:
            self.start(name, "a")
        self.until_began(1)

    def began(self, name: str) -> list[list[str]]:
        """Return pid, address, port, rank and number of hosts of each process that has begun on a host."""
        log = self.run_dir / ("log.txt" if name == "l0" else "log.1.txt")
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def until_began(self, times: int) -> list[int]:
        """Wait until the processes have begun together so often; return their pids."""
        until(lambda: [len(self.began(name)) for name in HOSTS] == [times, times])
        (first, *met), (other, *also_met) = (self.began(name)[-1] for name in HOSTS)
        assert (met[:2], met[2:], also_met[2:]) == (also_met[:2], ["0", "2"], ["1", "2"])
        return [int(first), int(other)]

    def until_ended(self, outcome: str, mark: str = "a") -> None:
        until(lambda: [desk.ended(mark) for desk in self.desks.values()] == [outcome, outcome])

    def said(self, name: str) -> list[str]:
        return [it["text"] for it in self.desks[name].events()[0] if it["event"] == "said"]

    @property
    def keepers(self) -> list[psutil.Process]:
        return keepers_of(self.run_dir)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(tmp_path)
    yield learner
    for keeper in learner.keepers:
        keeper.kill()


@pytest.mark.seconds
def test_processes_meet_at_host_0_and_end_with_it(learner: Learner) -> None:
    learner.order(BEGAN)
    learner.start("l0.1", "a")  # it waits for host 0
    learner.start("l0", "a")
    learner.until_ended("finished")
    learner.until_began(1)
    until(lambda: not learner.keepers)


@pytest.mark.seconds
@pytest.mark.parametrize("rank", [0, 1])
def test_both_processes_begin_again_after_one_has_died(learner: Learner, rank: int) -> None:
    learner.run(TRAIN)
    before = learner.until_began(1)
    os.kill(before[rank], signal.SIGKILL)
    after = learner.until_began(2)
    assert not {*before} & {*after}
    assert any("died (signal SIGKILL); restart 1" in text for text in learner.said("l0")), "host 0 counts both"


@pytest.mark.seconds
@pytest.mark.parametrize("name", HOSTS)
def test_both_processes_begin_again_after_a_newer_keeper_has_taken_over(learner: Learner, name: str) -> None:
    learner.run(TRAIN)
    learner.start(name, "b")
    learner.until_began(2)
    until(lambda: len(learner.keepers) == 2)
    assert learner.desks[name].newest() == "b"


@pytest.mark.seconds
def test_a_finished_host_waits_for_host_0_and_begins_again_with_it(learner: Learner, tmp_path: Path) -> None:
    learner.run(f"{BEGAN}if rank == '0' and not os.path.exists({str(tmp_path / 'stop')!r}): time.sleep(600)")
    until(lambda: learner.said("l0.1") == ["l0.1 finished"])
    (tmp_path / "stop").touch()
    os.kill(learner.until_began(1)[0], signal.SIGKILL)
    learner.until_ended("finished")
    learner.until_began(2)


@pytest.mark.seconds
def test_an_order_to_leave_ends_both_hosts(learner: Learner) -> None:
    learner.run(TRAIN)
    learner.order(TRAIN, wish="leave", within_s=DEADLINE_S)
    learner.until_ended("stopped")
    assert not learner.said("l0.1")


@pytest.mark.seconds
def test_an_order_to_leave_ends_a_host_that_waits_for_host_0(learner: Learner) -> None:
    learner.order(TRAIN)
    learner.start("l0.1", "a")
    until(lambda: learner.desks["l0.1"].newest() == "a")
    learner.order(TRAIN, wish="leave")
    until(lambda: learner.desks["l0.1"].ended("a") == "stopped")


@pytest.mark.seconds
def test_a_learner_is_refused_if_one_of_its_hosts_is(learner: Learner) -> None:
    learner.run(f"{BEGAN}if rank == '1': sys.exit(2)\ntime.sleep(600)")
    learner.until_ended("refused")
    assert "exit code 2" in learner.said("l0.1")[0]


@pytest.mark.seconds
def test_a_learner_is_refused_if_host_0_dies_at_the_same_time(learner: Learner) -> None:
    learner.order(f"{BEGAN}sys.exit(1 + int(rank))")
    for name in HOSTS:
        learner.start(name, "a")
    learner.until_ended("refused")


@pytest.mark.seconds
def test_host_0_is_not_killed_after_its_training_is_done(learner: Learner, tmp_path: Path) -> None:
    done = tmp_path / "finished"
    code = f"{BEGAN}if rank == '1': sys.exit(3)\nopen({str(done)!r}, 'w').close(); time.sleep(4 * 0.5)"
    learner.order(code, done_path=str(done))
    for name in HOSTS:
        learner.start(name, "a")
    learner.until_ended("finished")
    assert any("l0.1 died (exit code 3" in text for text in learner.said("l0.1"))
    assert len(learner.began("l0")) == 1


@pytest.mark.seconds
def test_other_hosts_end_when_host_0_has_used_up_the_restarts(learner: Learner) -> None:
    learner.order(f"{BEGAN}if rank == '1': sys.exit(3)\ntime.sleep(600)", max_restarts=1)
    for name in HOSTS:
        learner.start(name, "a")
    learner.until_ended("gave up")
    learner.until_began(2)


class Told:
    """The events of one host, written by hand."""

    def __init__(self, run_dir: Path, name: str) -> None:
        make_folder(run_dir)
        self.desk = Desk(run_dir, name)

    def __call__(self, event: str, text: str = "", keeper: str = "a") -> None:
        self.desk.tell(keeper, event, text)


def other(run_dir: Path, told: Told, since: int = 0, *, ends: bool = True) -> OtherHost:
    order = replace(Order.of(Command(name="l0", argv=(sys.executable,), log_path=run_dir), None, ""), num_hosts=2)
    return OtherHost(run_dir, "l0.1", replace(order, since=since), told, lambda: ends)


def test_host_0_gives_its_process_time_to_leave_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, also_told = Told(tmp_path, "l0"), Told(tmp_path, "l0.1")
    first = FirstHost("host-a", [also_told.desk], told)
    first.meet()
    (it,), _ = told.desk.events()
    also_told("lost", "an older one")
    monkeypatch.setattr(group, "GRACE_S", 0.0)
    assert not first.is_over
    also_told("lost", it["text"])
    monkeypatch.setattr(group, "GRACE_S", 600.0)
    assert not first.is_over
    monkeypatch.setattr(group, "GRACE_S", 0.0)
    assert first.is_over
    first.meet()
    assert not first.is_over


def test_a_host_joins_no_rendezvous_twice_or_of_an_older_keeper(tmp_path: Path) -> None:
    first, told = Told(tmp_path, "l0"), Told(tmp_path, "l0.1")
    first("began"), first("started", "host-a:1 x")
    assert other(tmp_path, told).meet()["MASTER_PORT"] == "1"
    with pytest.raises(NoMeetingError):
        other(tmp_path, told).meet()  # a newer keeper
    assert [(it["event"], it["text"][-1]) for it in told.desk.events()[0]] == [("joined", "x"), ("lost", "x")]
    first("started", "host-a:2 y")
    assert other(tmp_path, told).meet()["MASTER_PORT"] == "2"
    first("began", keeper="b"), first("started", "host-a:3 z")
    with pytest.raises(NoMeetingError):
        other(tmp_path, told).meet()
    assert [it["event"] for it in told.desk.events()[0]] == ["joined", "lost", "joined"]


def test_a_host_ends_only_by_the_end_of_its_own_order(tmp_path: Path) -> None:
    first, told = Told(tmp_path, "l0"), Told(tmp_path, "l0.1")
    first("began"), first("ended", "stopped")
    since = first.desk.num_bytes
    first("ended", "stopped")  # of an older keeper, which was late
    host = other(tmp_path, told, since)
    assert host.outcome("finished") == "running"
    first("began", keeper="b"), first("ended", "gave up", keeper="b")
    assert host.outcome("finished") == "gave up"
    assert host.outcome("running") == "running", "it has time to end by itself"


def test_only_one_host_of_a_learner_has_its_name_and_its_done_path(tmp_path: Path) -> None:
    done, log = tmp_path / "finished", tmp_path / "log.txt"
    order = Order.of(Command(name="l0", argv=(sys.executable,), log_path=log, done_path=done), None, "known")
    first, second = (order.command(name, tmp_path, "host-a", dict) for name in host_names("l0", 2))
    assert (first.name, first.log_path, first.done_path) == ("l0", log, done)
    assert (second.name, second.log_path, second.done_path) == ("l0.1", tmp_path / "log.1.txt", None)
