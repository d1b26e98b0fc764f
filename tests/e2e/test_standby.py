"""A standby as a process: it follows, takes over, and is followed by the former primary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial

import pytest

from lightning_diloco.protocol.syncer.succession import ALONE_S
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer.replay import replay
from tests.e2e.conftest import HERE, Processes, until
from tests.e2e.learner import TOKENS
from tests.e2e.pair import COMMAND, Pair
from tests.e2e.recorded import assert_recorded_exactly
from tests.e2e.test_processes import NUM_FRAGMENTS, assert_exact, restored

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def assert_whole(pair: Pair, which: int, learners: list[str]) -> None:
    """Check that nothing was lost or counted twice, and that learners hold the anchors on this syncer's disk."""
    summary = json.loads((pair.dirs[which] / "summary.json").read_text())
    held = [pair.processes.held(name) for name in learners]
    assert summary["status"] == "finished"
    assert summary["tokens_seen"] == summary["tokens_merged"] == sum(h["steps"] for h in held) * TOKENS * NUM_FRAGMENTS
    assert_exact(summary)
    assert_recorded_exactly(pair.dirs[which])
    versions, digests = restored(pair.dirs[which], pair.processes.root / "copy")
    for h in held:
        assert all(h["digests"][p] == digests[p] for p in range(NUM_FRAGMENTS) if h["landed"][p] == versions[p])
    assert any(h["landed"] == versions for h in held)
    assert replay(pair.dirs[which]).versions == tuple(versions)
    events = [line["event"] for line in read_tape(pair.dirs[which] / "tape" / "events.jsonl")]
    assert "regenerated" not in events, "all that a learner knew was at the standby"
    assert events.count("join") == len(learners)


def assert_takes_over(pair: Pair, learner: subprocess.Popen[bytes]) -> None:
    """Check that the second syncer takes over from the first one, and serves the only learner, l0, to the end."""
    pair.until_commits(0, 4)
    pair.kill(0)
    pair.until_commits(1, 4)
    pair.processes.stop_file.touch()
    assert [pair.processes.end(process) for process in (learner, pair.running[1])] == [0, 0]
    assert_whole(pair, 1, ["l0"])


@pytest.mark.parametrize("num_shards", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_takeovers_back_and_forth_lose_nothing(processes: Processes, num_shards: int) -> None:
    pair = Pair(processes, expect=2, num_shards=num_shards)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    primary = 0
    for _ in range(2):
        pair.until_registered(primary)
        pair.until_commits(primary, 4)
        pair.kill(primary)
        began_s = time.monotonic()
        pair.until_commits(1 - primary, 1)
        assert time.monotonic() - began_s < 20.0
        pair.restart(primary)
        primary = 1 - primary
    pair.until_registered(primary)
    pair.until_commits(primary, 4)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, *pair.running)] == [0, 0, 0, 0]
    assert_whole(pair, primary, ["l0", "l1"])
    told = ("restarted", "took over", "standby joined", "standby lost")
    tape = [line for line in read_tape(pair.dirs[primary] / "tape" / "events.jsonl") if line["event"] in told]
    assert [line["event"] for line in tape] == ["standby joined", "took over"] * 2 + ["standby joined"]
    first, second = (pair.address(which) for which in range(2))
    takeovers = [(line["address"], line["primary"], line["reign"]) for line in tape if line["event"] == "took over"]
    assert takeovers == [(second, first, 1), (first, second, 2)]
    assert [line["standby"] for line in tape if line["event"] == "standby joined"] == [second, first, second]
    for which in range(2):
        said = (processes.root / f"syncer{which}.log").read_text()
        assert said.count("keeps its records up to") == 1
        assert "the tape is not copied" not in said
        assert said.count("copying the run") == which, "the standby at the start has none yet"


def test_all_ranks_upload_to_the_new_syncer_including_those_of_a_later_learner(processes: Processes) -> None:
    """The later one dials the former primary first: the addresses in its join string have the old order."""
    pair = Pair(processes, expect=1)
    join = processes.address.join_string()

    def start(learner: str) -> list[subprocess.Popen[bytes]]:
        folder = processes.root / learner
        folder.mkdir()
        (folder / "go").touch()
        env = {"DILOCO_JOIN": join, "DILOCO_LEARNER": learner}
        script = (HERE / "two_ranks.py", folder)
        return [processes.start(f"{learner}.{r}", *script, r, 2, "direct", 0, "whole", **env) for r in range(2)]

    def have_sent(learner: str, syncer: int) -> bool:
        files = [processes.root / learner / f"sent.{rank}" for rank in range(2)]
        return all(file.exists() and pair.address(syncer) in json.loads(file.read_text()) for file in files)

    ranks = start("l0")
    pair.until_registered(0)
    pair.until_commits(0, 4)
    join = processes.address.join_string()
    pair.kill(0)
    pair.until_commits(1, 1)
    pair.restart(0)
    pair.until_registered(1)
    ranks += start("late")
    for learner, syncer in (("l0", 0), ("l0", 1), ("late", 1)):
        until(partial(have_sent, learner, syncer), f"uploads of both ranks of {learner} to {syncer}", processes)
    for learner in ("l0", "late"):
        (processes.root / learner / "stop").touch()
    assert [processes.end(process) for process in (*ranks, *pair.running)] == [0] * 6
    assert "cannot reach the syncer" not in processes.logs()
    summary = json.loads((pair.dirs[1] / "summary.json").read_text())
    assert (summary["status"], summary["tokens_merged"]) == ("finished", summary["tokens_seen"])
    assert_exact(summary)


@pytest.mark.parametrize("num_shards", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_suspended_primary_that_wakes_up_becomes_the_standby(processes: Processes, num_shards: int) -> None:
    pair = Pair(processes, expect=2, num_shards=num_shards)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    pair.until_registered(0)
    pair.until_commits(0, 4)
    os.kill(pair.running[0].pid, signal.SIGSTOP)
    pair.until_commits(1, 2)
    os.kill(pair.running[0].pid, signal.SIGCONT)
    pair.until_registered(1)
    pair.until_commits(1, 4)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, *pair.running)] == [0, 0, 0, 0]
    assert_whole(pair, 1, ["l0", "l1"])


def test_a_run_waits_for_a_killed_standby_and_then_continues_without_it(processes: Processes) -> None:
    pair = Pair(processes, expect=1)
    learner = processes.learner("l0")
    pair.until_registered(0)
    pair.until_commits(0, 4)
    pair.until_in_contact()
    pair.kill(1)
    waits = until(lambda: [w for w in pair.status(0)["waits"] if w["for"] == ["the standby"]], "the wait", processes)
    assert 0 < waits[0]["until_s"] <= ALONE_S
    until(lambda: pair.status(0)["standby"] is None, "the end of the wait", processes)
    pair.until_commits(0, 4)
    assert "standby lost" in [event["event"] for event in pair.status(0)["recent"]]
    pair.restart(1)
    pair.until_registered(0)
    assert "copying the run" not in (processes.root / "syncer1.log").read_text().rpartition("is the standby of")[2]
    assert_takes_over(pair, learner)


def test_a_standby_without_enough_learners_takes_over_on_request(processes: Processes) -> None:
    pair = Pair(processes, expect=2)
    learners = [processes.learner(name) for name in ("l0", "l1")]
    pair.until_registered(0)
    pair.until_commits(0, 4)
    primary = pair.address(0)
    pair.kill(0)
    os.kill(learners[1].pid, signal.SIGSTOP)  # as if it were on the primary's machine
    said = "may have continued without this standby. If it is lost: diloco syncer --run-dir"
    until(lambda: said in (processes.root / "syncer1.log").read_text(), "the advice", processes)
    assert pair.status(1) is None
    pair.running[1].terminate()
    assert processes.end(pair.running[1]) == 0
    pair.running[1] = processes.start("syncer1", *COMMAND, "--run-dir", pair.dirs[1], "--expect", "2", "--take-over")
    pair.until_commits(1, 2)
    told = [event for event in pair.status(1)["recent"] if event["event"] in ("restarted", "took over")]
    assert [(event["event"], event.get("primary")) for event in told] == [
        ("restarted", None),
        ("took over", primary),
    ]
    os.kill(learners[1].pid, signal.SIGCONT)
    pair.until_commits(1, 4)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (*learners, pair.running[1])] == [0, 0, 0]
    assert_whole(pair, 1, ["l0", "l1"])


@pytest.mark.parametrize("num_shards", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_standby_that_is_started_while_the_primary_is_away_waits_for_it(
    processes: Processes, num_shards: int
) -> None:
    pair = Pair(processes, expect=1, num_shards=num_shards)
    learner = processes.learner("l0")
    pair.until_registered(0)
    pair.until_commits(0, 4)
    pair.kill(1)
    pair.kill(0)
    log = processes.root / "syncer1.log"
    pair.restart(1)
    until(lambda: log.read_text().count("is the standby of") == 2, "the standby", processes)
    pair.restart(0)
    pair.until_registered(0)
    assert_takes_over(pair, learner)


def test_a_run_has_one_standby_which_needs_the_key(processes: Processes) -> None:
    pair = Pair(processes, expect=1)
    learner = processes.learner("l0")
    pair.until_registered(0)
    third = processes.start("third", *COMMAND, "--run-dir", processes.root / "third", "--standby-of", pair.invitation)
    assert processes.end(third) == 2
    assert f"the run has a standby already, {pair.address(1)}" in (processes.root / "third.log").read_text()

    wrong = f"{processes.address.join_string()},{'0' * 64}"
    stranger = processes.start("stranger", *COMMAND, "--run-dir", processes.root / "stranger", "--standby-of", wrong)
    assert processes.end(stranger) == 2
    said = (processes.root / "stranger.log").read_text()
    assert "the key of the standby is wrong" in said
    assert processes.address.token not in said

    learners_string = processes.start(
        "learners", *COMMAND, "--run-dir", processes.root / "learners", "--standby-of", processes.run_dir / "join"
    )
    assert processes.end(learners_string) == 2
    assert "copy all of it from RUN_DIR/standby" in (processes.root / "learners.log").read_text()
    pair.until_commits(0, 2)
    processes.stop_file.touch()
    assert [processes.end(process) for process in (learner, *pair.running)] == [0, 0, 0]
