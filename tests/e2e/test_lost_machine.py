"""The primary's machine, a network namespace, vanishes from the network and comes back; needs root and Linux."""

from __future__ import annotations

import os
import shutil
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
    pytest.mark.skipif(shutil.which("ip") is None or os.geteuid() != 0, reason="needs ip and root, for a namespace"),
]

HERE, THERE = "10.213.7.1", "10.213.7.2"
TAKEOVER_S = 10.0
HOOK_S = 1.0  # a step that waits for the network takes seconds


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


class TwoMachines(Processes):
    """Processes of which the first syncer runs in another network namespace."""

    def __init__(self, root: Path, there: str) -> None:
        super().__init__(root)
        self._there = there

    def start(self, name: str, *argv: object, **options: Any) -> subprocess.Popen[bytes]:
        if name not in ("syncer", "syncer0"):
            return super().start(name, *argv, **options, LISTEN=f"{HERE}:0")
        there = ("netns", "exec", self._there, sys.executable)
        return super().start(name, *there, *argv, **options, python="ip", LISTEN=f"{THERE}:0")

    def set_link(self, state: str) -> None:
        ip("-n", self._there, "link", "set", "there", state)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    there, link = f"diloco-{os.getpid()}", f"dl{os.getpid()}"
    ip("netns", "add", there)
    machines = TwoMachines(tmp_path, there)
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "there", "netns", there)
        ip("addr", "add", f"{HERE}/24", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", there, "addr", "add", f"{THERE}/24", "dev", "there")
        machines.set_link("up")
        yield machines
    finally:
        machines.kill_all()
        ip("netns", "delete", there)  # and the link with it


def test_rounds_continue_and_nothing_is_lost_after_the_machine_of_the_primary_is_lost(machines: TwoMachines) -> None:
    pair = Pair(machines, expect=2)
    learners = [machines.learner(name) for name in ("l0", "l1")]
    pair.until_registered(0)
    pair.until_commits(0, 8)
    pair.until_in_contact()
    machines.set_link("down")
    began_s = time.monotonic()
    pair.until_commits(1, 1)
    assert time.monotonic() - began_s < TAKEOVER_S
    machines.set_link("up")
    follows = f"is the standby of {pair.address(1)}"
    until(lambda: follows in (machines.root / "syncer.log").read_text(), "the former primary as the standby", machines)
    pair.until_registered(1)
    pair.until_commits(1, 8)
    machines.stop_file.touch()
    assert [machines.end(process) for process in (*learners, *pair.running)] == [0] * 4
    assert_whole(pair, 1, ["l0", "l1"])
    assert max(machines.held(name)["longest_hook_s"] for name in ("l0", "l1")) < HOOK_S
