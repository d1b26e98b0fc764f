"""One rank of a learner fails, or all are refused: each ends with exit code 1 and a reason; none hangs or aborts."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from tests.alive import is_running
from tests.e2e.conftest import Processes, until
from tests.e2e.test_launchers import srun
from tests.e2e.test_ranks import OF_THE_RUN, rank_pids

pytestmark = pytest.mark.slow

SEVERAL, SPAWNED, UNSET = ("--devices", 2), ("--devices", 2, "--inner", "spawn"), json.loads(OF_THE_RUN)
STARTED = [pytest.param(SEVERAL, id="scripts"), pytest.param(SPAWNED, id="spawned", marks=pytest.mark.thorough)]
ABORTED = re.compile(r"SIGABRT|SIGKILL|Fatal Python error|terminated with signal|terminate called|zombies")
OTHER = re.compile(r"DiLoCoError: (?:another rank|a rank|rank 0) of this learner .*start.*again")


def log_of(processes: Processes, name: str) -> str:
    return (processes.root / f"{name}.log").read_text()


def end(processes: Processes, name: str, learner: subprocess.Popen[bytes], expected: int = 1) -> str:
    """Wait for the end of all processes of a learner; return their output."""
    code = processes.end(learner)
    pids = rank_pids(processes, name).values()
    until(lambda: not any(map(is_running, pids)), "the end of all ranks", processes)
    said = log_of(processes, name)
    assert (code, ABORTED.findall(said)) == (expected, []), said
    return said


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SEVERAL, id="ddp", marks=pytest.mark.thorough),
        pytest.param((*SEVERAL, "--inner", "fsdp2"), id="fsdp2"),
        pytest.param(SPAWNED, id="spawned", marks=pytest.mark.thorough),
    ],
)
def test_bad_input_on_one_rank_ends_all_ranks(processes: Processes, layout: tuple[Any, ...], rank: int) -> None:
    said = end(processes, "bad", processes.trainer("bad", *layout, "--fails", 5, rank))
    assert said.count("ValueError: bad input on one rank") == 1
    if layout is not SPAWNED:  # the process that spawned ranks shows the first error only
        assert len(OTHER.findall(said)) == 1


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_each_externally_started_rank_ends_with_code_1(processes: Processes, rank: int) -> None:
    ranks = srun(processes, "bad", "--fails", 5, rank, options=[{"learner": "bad"}] * 2)
    assert [processes.end(process) for process in ranks] == [1, 1]
    said = [log_of(processes, f"bad-{k}") for k in range(2)]
    assert [text.count("ValueError: bad input on one rank") for text in said] == [int(k == rank) for k in range(2)]
    assert [len(OTHER.findall(text)) for text in said] == [int(k != rank) for k in range(2)]
    assert not [found for text in said for found in ABORTED.findall(text)]


@pytest.mark.parametrize("layout", STARTED)
def test_a_learner_whose_work_is_not_merged_continues_after_its_fit_and_ends_with_code_1(
    processes: Processes, layout: tuple[Any, ...]
) -> None:
    processes.syncer()
    found = {"DILOCO_JOIN": processes.address.join_string(), "DILOCO_LEARNER": "brief"}
    options = ("--steps", 5, "--options", json.dumps({**UNSET, "drain_s": 0.0}))
    said = end(processes, "brief", processes.trainer("brief", *layout, *options, **found))
    assert said.count("exit code 1: the run was left at step 5 before all of this learner's work was merged") == 1
    assert len(processes.ranks_held("brief")) == (1 if layout is SPAWNED else 2), "what follows the fit was carried out"


@pytest.mark.parametrize("layout", STARTED)
def test_ranks_that_wait_for_their_syncer_at_the_end_leave_after_sigterm(
    processes: Processes, layout: tuple[Any, ...]
) -> None:
    syncer = processes.syncer()
    stop = processes.root / "stop"
    found = {"DILOCO_JOIN": processes.address.join_string(), "DILOCO_LEARNER": "asked"}
    options = ("--steps", 10**6, "--options", OF_THE_RUN, "--stop-file", stop, "--pause-s", 0.02)
    learner = processes.trainer("asked", *layout, *options, **found)
    until(lambda: processes.status()["num_commits"] > 0, "a commit", processes)
    syncer.kill()
    stop.touch()
    waits = "the last contributions wait for the syncer"
    until(lambda: waits in log_of(processes, "asked"), "the end of training", processes)
    learner.terminate()
    said = end(processes, "asked", learner, expected=143)
    assert said.count("before all of this learner's work was merged. Its next process goes on") == 1
    assert "has not ended; it ends now" not in said


@pytest.mark.parametrize("layout", STARTED)
def test_all_ranks_report_options_that_contradict_the_run(processes: Processes, layout: tuple[Any, ...]) -> None:
    processes.syncer(sync_every=4, num_fragments=2, overlap=1)
    found = {"DILOCO_JOIN": processes.address.join_string(), "DILOCO_LEARNER": "refused"}
    options = json.dumps({**UNSET, "sync_every": 6})
    said = end(processes, "refused", processes.trainer("refused", *layout, "--options", options, **found))
    assert "sync_every=6 was asked for, the run has sync_every=4" in said.rstrip().splitlines()[-1]


@pytest.mark.parametrize("layout", STARTED)
def test_a_learner_restarted_after_its_run_ends_with_code_0_and_logs_it_once(
    processes: Processes, layout: tuple[Any, ...]
) -> None:
    processes.syncer(expect=1)
    found = {"DILOCO_JOIN": processes.address.join_string(), "DILOCO_LEARNER": "late"}
    found["DILOCO_RUN_DIR"] = str(processes.run_dir)
    options = ("--options", OF_THE_RUN, "--steps", 8)
    assert processes.end(processes.trainer("once", *options, **found)) == 0
    until((processes.run_dir / "summary.json").exists, "the summary", processes)
    learner = processes.trainer("again", *layout, *options, **found)
    assert processes.end(learner) == 0
    pids = rank_pids(processes, "again").values()
    until(lambda: not any(map(is_running, pids)), "the end of all ranks", processes)
    said = log_of(processes, "again")
    assert said.count("has finished, nothing is left to train") == 1
    assert "Traceback" not in said
    assert processes.ranks_held("again") == []
