"""A keeper runs the process of its order, and leaves it to a newer keeper. These tests do not need Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lightning_diloco.cli.local.fleet import Command
from lightning_diloco.cli.ray.files import Desk, Order, make_folder
from tests.alive import is_running

DEADLINE_S = 30.0
SLEEP = "import time; time.sleep(600)"
OBEDIENT = (
    "import os, signal, sys, time\n"
    "def leave(*_):\n    print('left', os.getpid(), flush=True)\n    sys.exit(143)\n"
    "signal.signal(signal.SIGTERM, leave)\nprint('began', os.getpid(), flush=True)\ntime.sleep(600)"
)
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('began', flush=True); {SLEEP}"


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


class Place:
    """A run directory with the order of one process, l0."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        make_folder(run_dir)
        self.desk = Desk(run_dir, "l0")

    def order(self, code: str, **changed: object) -> None:
        command = Command(name="l0", argv=(sys.executable, "-ISc", code), log_path=self.run_dir / "log.txt")
        told = {**vars_of(Order.of(command, None, "known")), **changed}
        self.desk.write_order(Order(**told))

    def start(self, mark: str) -> None:
        words = ("-m", "lightning_diloco.cli.ray.keeper", self.run_dir, "l0", mark, "host-a")
        subprocess.run([sys.executable, *map(str, words)], check=True, timeout=DEADLINE_S)

    def run(self, code: str) -> None:
        """Wait until the process of this order has begun."""
        self.order(code)
        self.start("a")
        until(lambda: self.log)

    @property
    def log(self) -> str:
        path = self.run_dir / "log.txt"
        return path.read_text() if path.exists() else ""

    @property
    def said(self) -> list[str]:
        return [it["text"] for it in self.desk.events()[0] if it["event"] == "said"]

    @property
    def keepers(self) -> list[psutil.Process]:
        return keepers_of(self.run_dir)


def keepers_of(run_dir: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or ())]


def vars_of(order: Order) -> dict[str, object]:
    return {name: getattr(order, name) for name in Order.__dataclass_fields__}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for keeper in place.keepers:
        keeper.kill()


@pytest.mark.seconds
def test_a_process_that_finishes_is_reported_and_leaves_no_process(place: Place) -> None:
    place.order("import os; print(os.environ['DILOCO_HOST'])")
    place.start("a")
    until(lambda: place.desk.ended("a"))
    assert (place.desk.ended("a"), place.log) == ("finished", "host-a\n")
    assert [it["event"] for it in place.desk.events()[0]] == ["began", "said", "ended"]
    until(lambda: not place.keepers)


def test_a_keeper_outlives_its_starter_in_a_session_of_its_own(place: Place) -> None:
    place.order(OBEDIENT)
    place.start("a")  # the starter has ended
    until(lambda: place.log)
    (keeper,) = place.keepers
    assert os.getsid(keeper.pid) == keeper.pid
    assert keeper.ppid() != os.getpid()


@pytest.mark.seconds
def test_a_process_that_dies_is_restarted_without_limit(place: Place, tmp_path: Path) -> None:
    tries = str(tmp_path / "tries")
    count = f"print('x', file=open({tries!r}, 'a'))\nnumber = len(open({tries!r}).readlines())"
    place.order(f"{count}\nraise SystemExit(3 if number < 5 else 0)")
    place.start("a")
    until(lambda: place.desk.ended("a") == "finished")
    assert place.said == [*(f"l0 died (exit code 3); restart {k}" for k in (1, 2, 3, 4)), "l0 finished"]


def test_a_process_with_a_wrong_command_line_is_not_restarted(place: Place) -> None:
    place.order("raise SystemExit(2)")
    place.start("a")
    until(lambda: place.desk.ended("a") == "refused")
    assert "exit code 2" in place.said[0]


def test_an_order_to_leave_lets_the_process_leave_cleanly(place: Place) -> None:
    place.run(OBEDIENT)
    place.order(OBEDIENT, wish="leave", within_s=DEADLINE_S)
    until(lambda: place.desk.ended("a") == "stopped")
    assert [line.split()[0] for line in place.log.splitlines()] == ["began", "left"]


def test_an_order_to_kill_kills_the_process_at_once(place: Place) -> None:
    place.run(STUBBORN)
    place.order(STUBBORN, wish="leave", within_s=600.0)
    place.order(STUBBORN, wish="kill", within_s=600.0)
    until(lambda: place.desk.ended("a") == "stopped")


def test_an_order_to_leave_before_the_start_starts_no_process(place: Place) -> None:
    place.order(OBEDIENT, wish="leave")
    place.start("a")
    until(lambda: place.desk.ended("a") == "stopped")
    assert place.log == ""


@pytest.mark.seconds
def test_the_newest_keeper_runs_the_process_after_the_older_one_has_left(place: Place) -> None:
    place.run(OBEDIENT)
    place.start("b")
    until(lambda: place.log.count("began") == 2)
    (began, old), (left, also_old), (again, new) = (line.split() for line in place.log.splitlines())
    assert (began, left, again) == ("began", "left", "began")
    assert old == also_old != new
    assert len(place.keepers) == 1
    assert place.desk.newest() == "b"
    assert place.desk.ended("a") is None  # it has not ended, it was replaced


@pytest.mark.seconds
def test_another_command_replaces_the_process(place: Place) -> None:
    place.run(STUBBORN)
    place.order("print('another')")
    until(lambda: place.desk.ended("a") == "finished")
    assert place.log == "began\nanother\n"


def test_killing_a_keeper_leaves_no_process(place: Place) -> None:
    place.run(OBEDIENT)
    place.keepers[0].kill()
    until(lambda: not is_running(int(place.log.split()[1])))


@pytest.mark.seconds
def test_a_keeper_after_sigterm_leaves_and_reports_no_end(place: Place) -> None:
    place.run(OBEDIENT)
    place.keepers[0].send_signal(signal.SIGTERM)
    until(lambda: not place.keepers)
    assert "left" in place.log
    assert place.desk.ended("a") is None
