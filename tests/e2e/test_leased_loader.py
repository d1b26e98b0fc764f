"""A user's own loader whose samples are leased, counted from each process's records and from the redo log."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from lightning_diloco.strategy.data.leased_part import MIN_SAMPLES, NUM_RANGES
from tests.e2e.conftest import HERE, Processes, until
from tests.e2e.test_leased_data import contributors, done, history, merged

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def start(processes: Processes, name: str, **options: object) -> subprocess.Popen[bytes]:
    (processes.root / name).mkdir()
    given = {"out": processes.root / name / "noted", "until": processes.root / "stop", **options}
    arguments = [text for option, value in given.items() for text in (f"--{option}", value)]
    join = processes.address.join_string()
    return processes.start(name, HERE / "loader_learner.py", *arguments, DILOCO_JOIN=join, DILOCO_LEARNER=name)


def read(processes: Processes, name: str, num_ranks: int) -> tuple[str, list[int]]:
    """Return the session of a learner, and the sample of each token of its counter."""
    notes = [
        [json.loads(line) for line in (processes.root / name / f"noted.{rank}.jsonl").read_text().splitlines()]
        for rank in range(num_ranks)
    ]
    steps = zip(*notes, strict=False)  # the last step of a killed learner may be missing on some ranks
    return notes[0][0]["session"], [sample for step in steps for note in step for sample in note["samples"]]


def test_ranks_read_more_than_a_slow_learner_and_take_over_its_ranges_after_a_kill(processes: Processes) -> None:
    syncer = processes.syncer(data_parts=2)
    fast = start(processes, "fast", devices=2, **{"pause-s": 0.01})
    slow = start(processes, "slow", workers=2, **{"pause-s": 0.1})
    until(lambda: contributors(processes.run_dir) == {"fast", "slow"}, "commits of both", processes)
    until(lambda: len(read(processes, "slow", 1)[1]) > 240, "20 steps of the slow one", processes)
    os.killpg(slow.pid, signal.SIGKILL)
    processes.end(slow)
    log_dir = iter(range(10**6))

    def first_epoch() -> int:
        log = history(processes.run_dir, processes.root / f"copy{next(log_dir)}")
        return sum(epoch == 0 for epoch, *_ in done(log))

    until(lambda: first_epoch() == NUM_RANGES, "the first epoch of the data", processes)
    processes.stop_file.touch()
    assert processes.end(fast) == 0
    syncer.terminate()
    assert processes.end(syncer) == 0

    summary, trained = processes.summary(), dict([read(processes, "fast", 2), read(processes, "slow", 1)])
    log = history(processes.run_dir, processes.root / "copy")
    assert summary["ledger_exact"]
    assert max(done(log).values()) == 1, "no range is done twice"
    counts = merged(log, trained)
    assert sum(count.total() for count in counts) == summary["tokens_merged"]
    assert all(count.keys() == set(range(MIN_SAMPLES)) for count in counts), "merged in every fragment"
    first, second = (len(samples) for samples in trained.values())
    assert first > 3 * second > 0, "each reads what it has time for"
    assert "leased from the run" in (processes.root / "slow.log").read_text()
