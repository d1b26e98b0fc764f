"""Ranks started by external launchers, and the samples that the ranks of two learners read together."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from itertools import chain
from typing import Any

import pytest

from tests.e2e.conftest import HERE, Processes
from tests.e2e.trainer import NUM_SAMPLES

pytestmark = pytest.mark.slow

NUM_LEARNERS, NUM_RANKS, NUM_BATCH = 2, 2, 8
EPOCH_STEPS = NUM_SAMPLES // NUM_BATCH // NUM_LEARNERS
OF_THE_RUN = {"sync_every": None, "num_fragments": None, "overlap": None}


def srun(
    processes: Processes, name: str, *arguments: object, options: list[dict[str, Any]], **env: str
) -> list[subprocess.Popen[bytes]]:
    """Start one task per rank with the environment of srun, and with options for each rank."""
    (processes.root / name).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    tasks = {"SLURM_NTASKS": str(NUM_RANKS), "SLURM_NTASKS_PER_NODE": str(NUM_RANKS), "SLURM_NODELIST": "127.0.0.1"}
    trainer = (HERE / "trainer.py", "--out", processes.root / name / "held", "--devices", NUM_RANKS, *arguments)
    return [
        processes.start(
            f"{name}-{rank}",
            *(*trainer, "--options", json.dumps(own)),
            **{**job, **tasks, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port), **env},
        )
        for rank, own in enumerate(options)
    ]


def test_learners_of_several_ranks_read_each_sample_once(processes: Processes) -> None:
    """SLURM starts one learner; the other one starts its ranks itself. Both shuffle."""
    processes.syncer(expect=NUM_LEARNERS, data_parts=NUM_LEARNERS)
    join = processes.address.join_string()
    steps, options = ("--steps", EPOCH_STEPS), [OF_THE_RUN] * NUM_RANKS
    started = srun(processes, "slurm", *steps, options=options, DILOCO_JOIN=join, DILOCO_LEARNER="slurm")
    scripts = (*steps, "--devices", NUM_RANKS, "--options", json.dumps(OF_THE_RUN))
    started.append(processes.trainer("scripts", *scripts, DILOCO_JOIN=join, DILOCO_LEARNER="scripts"))
    assert [processes.end(process) for process in started] == [0] * len(started)

    seen = [rank["seen"] for name in ("slurm", "scripts") for rank in processes.ranks_held(name)]
    assert [len(each) for each in seen] == [NUM_SAMPLES // NUM_LEARNERS // NUM_RANKS] * NUM_LEARNERS * NUM_RANKS
    assert sorted(chain(*seen)) == list(range(NUM_SAMPLES))
    assert all(each != sorted(each) for each in seen)
    found = processes.summary()
    assert (found["status"], found["joins"], found["ledger_exact"]) == ("finished", NUM_LEARNERS, True)


def test_all_ranks_report_settings_that_differ_between_ranks(processes: Processes) -> None:
    place, pin, named = "diloco://127.0.0.1:1/run", "0" * 64, {"learner": "l0", "overlap": 1}
    options = [
        {**named, "sync_every": 4, "join": f"{place}#tokenOf0,{pin}"},
        {**named, "sync_every": 6, "join": f"{place}#tokenOf1,{pin}", "evaluate": "local"},
    ]
    started = srun(processes, "mixed", options=options)
    assert all(processes.end(process) for process in started)
    for rank in range(NUM_RANKS):
        log = (processes.root / f"mixed-{rank}.log").read_text()
        assert "sync_every=4 on rank 0, but 6 on rank 1: all ranks of a learner must have the same settings" in log
        assert "evaluate='anchor' on rank 0, but 'local' on rank 1" in log
        assert re.search(r"join='\(SHA-256 \w{12}\)' on rank 0, but '\(SHA-256 \w{12}\)' on rank 1", log)
        assert "tokenOf" not in log
        assert "overlap" not in log.split("ConfigError")[-1]
    assert not list(processes.root.glob("**/manifest.json"))  # before any run began
