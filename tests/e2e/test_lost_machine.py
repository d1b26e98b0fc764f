"""The primary's machine, a network namespace, vanishes from the network and comes back; needs root and Linux."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Processes, until
from tests.e2e.pair import Pair
from tests.e2e.test_standby import assert_whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root, for a network namespace"),
]

HERE, THERE = "10.213.7.1", "10.213.7.2"
TAKEOVER_S = 10.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


class TwoMachines(Processes):
    """Processes of which the first syncer runs in another network namespace."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._name = f"diloco-{os.getpid()}"
        self._link = f"dl{os.getpid()}"
        ip("netns", "add", self._name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "there", "netns", self._name)
        ip("addr", "add", f"{HERE}/24", "dev", self._link)
        ip("link", "set", self._link, "up")
        ip("-n", self._name, "addr", "add", f"{THERE}/24", "dev", "there")
        self.reconnect()

    def disconnect(self) -> None:
        ip("-n", self._name, "link", "set", "there", "down")

    def reconnect(self) -> None:
        ip("-n", self._name, "link", "set", "there", "up")

    def start(self, name: str, *argv: object, **options: Any) -> subprocess.Popen[bytes]:
        if name != "syncer":
            return super().start(name, *argv, **options, LISTEN=f"{HERE}:0")
        there = ("netns", "exec", self._name, sys.executable)
        return super().start(name, *there, *argv, **options, python="ip", LISTEN=f"{THERE}:0")

    def kill_all(self) -> None:
        super().kill_all()
        ip("link", "delete", self._link)
        ip("netns", "delete", self._name)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    machines = TwoMachines(tmp_path)
    yield machines
    machines.kill_all()


def test_rounds_continue_and_nothing_is_lost_after_the_machine_of_the_primary_is_lost(machines: TwoMachines) -> None:
    pair = Pair(machines, expect=2)
    learners = [machines.learner(name) for name in ("l0", "l1")]
    pair.until_registered(0)
    pair.until_commits(0, 8)
    pair.until_in_contact()
    machines.disconnect()
    began_s = time.monotonic()
    pair.until_commits(1, 1)
    assert time.monotonic() - began_s < TAKEOVER_S
    machines.reconnect()
    follows = f"is the standby of {pair.address(1)}"
    until(lambda: follows in (machines.root / "syncer.log").read_text(), "the former primary as the standby", machines)
    pair.until_registered(1)
    pair.until_commits(1, 8)
    machines.stop_file.touch()
    assert [machines.end(process) for process in (*learners, *pair.running)] == [0] * 4
    assert_whole(pair, 1, ["l0", "l1"])
