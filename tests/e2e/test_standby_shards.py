"""A run with shards, and a standby with as many shards: the run continues after the loss of any machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import partial

import pytest

from tests.e2e.conftest import Processes, until
from tests.e2e.pair import COMMAND, Pair
from tests.e2e.test_shards import shards
from tests.e2e.test_standby import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def is_running_again(syncer: int, part: str, before: int) -> bool:
    """Return whether this shard of a syncer is a new process."""
    return (now := shards(syncer).get(part)) is not None and now.pid != before


def test_a_takeover_after_the_death_of_shards_on_both_sides_loses_nothing(processes: Processes) -> None:
    pair = Pair(processes, expect=2, num_shards=3)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    pair.until_registered(0)
    pair.until_commits(0, 8)
    for which, each in ((0, "1/3"), (1, "2/3"), (0, "2/3"), (1, "1/3")):
        killed = shards(pair.running[which].pid)[each]
        os.kill(killed.pid, signal.SIGKILL)
        returned = partial(is_running_again, pair.running[which].pid, each, killed.pid)
        until(returned, f"shard {each} of syncer {which}", processes)
        pair.until_commits(0, 8)
    pair.until_registered(0)
    stopped = shards(pair.running[1].pid)["1/3"]
    os.kill(stopped.pid, signal.SIGSTOP)
    waits = until(lambda: [w for w in pair.status(0)["waits"] if w["for"] == ["the standby"]], "the wait", processes)
    assert waits, "a decision is announced only when the standby's shard has its gradient"
    os.kill(stopped.pid, signal.SIGCONT)
    pair.until_commits(0, 8)
    pair.until_registered(0)
    pair.kill(0)
    pair.until_commits(1, 8)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, pair.running[1])] == [0, 0, 0]
    assert_whole(pair, 1, ["l0", "l1"])


def test_a_standby_takes_over_from_a_syncer_with_shards_on_other_machines(processes: Processes) -> None:
    def start(k: int) -> subprocess.Popen[bytes]:
        command = ("-m", "lightning_diloco.cli.main", "syncer", "--shard", f"{k}/3", "--of", pair.invitation)
        return processes.start(f"shard{k}", *command, "--run-dir", processes.root / f"shard{k}")

    pair = Pair(processes, expect=2, num_shards=3, shards_elsewhere=True)
    elsewhere = [start(k) for k in (1, 2)]
    learners = [processes.learner(name) for name in ("l0", "l1")]
    pair.until_registered(0)
    pair.until_commits(0, 8)
    pair.kill(0)
    for process in elsewhere:
        os.kill(process.pid, signal.SIGKILL)
        processes.end(process)
    pair.until_commits(1, 8)
    pair.restart(0, shards_elsewhere=True)
    elsewhere = [start(k) for k in (1, 2)]
    pair.until_registered(1)
    pair.until_commits(1, 8)
    pair.kill(1)
    pair.until_commits(0, 8)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, pair.running[0], *elsewhere)] == [0] * 5
    for k in (1, 2):  # `assert_whole` expects all files of the run there
        shutil.copytree(
            processes.root / f"shard{k}" / "syncer" / "shards", pair.dirs[0] / "syncer" / "shards", dirs_exist_ok=True
        )
    assert_whole(pair, 0, ["l0", "l1"])


def test_a_standby_has_as_many_shards_as_the_primary(processes: Processes) -> None:
    processes.syncer(expect=1, num_shards=2)
    learner = processes.learner("l0")
    command = (*COMMAND, "--run-dir", processes.root / "other", "--standby-of", processes.run_dir / "standby")
    until((processes.run_dir / "standby").exists, "the invitation", processes)
    assert processes.end(processes.start("other", *command, "--shards", "3")) == 2
    assert (
        "--shards 3: the primary has 2, and its standby has as many; omit" in (processes.root / "other.log").read_text()
    )
    processes.stop_file.touch()
    assert processes.end(learner) == 0
