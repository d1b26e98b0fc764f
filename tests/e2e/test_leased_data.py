"""Data leased to processes that join, leave and are killed, counted from each process's records and the redo log."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import TypeVar

import pytest

from lightning_diloco.protocol.syncer import records
from lightning_diloco.storage.redo_log import RedoLog
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.transport.address import read_join_file
from tests.e2e.conftest import HERE, Processes, until
from tests.e2e.reader import RANGE_SIZE, SIZES
from tests.e2e.recorded import assert_recorded_exactly, assert_tampering_is_seen

pytestmark = pytest.mark.slow

NUM_FRAGMENTS = 4
LEAVING = tuple(f"leaves{k}" for k in range(6))
Sample = tuple[int, ...]
S = TypeVar("S")
Range = tuple[int, int, int]


def start(processes: Processes, name: str):  # type: ignore[no-untyped-def]
    join = read_join_file(processes.run_dir / "join").join_string()
    arguments = ("--out", processes.root / f"{name}.steps", "--until", processes.root / f"stop-{name}")
    return processes.start(name, HERE / "reader.py", *arguments, DILOCO_JOIN=join, DILOCO_LEARNER=name)


def read(root: Path) -> dict[str, list[Sample]]:
    """Return the sample of each token of the counter, by session."""
    found: dict[str, list[Sample]] = {}
    for path in root.glob("*.steps"):
        for line in path.read_text().splitlines():
            step = json.loads(line)
            found.setdefault(step["session"], []).extend(map(tuple, step["samples"]))
    return found


def contributors(run_dir: Path) -> set[str]:
    """Return all learners that a commit names."""
    tape = read_tape(run_dir / "tape" / "events.jsonl")
    return {name for line in tape if line["event"] == "commit" for name in line["learners"]}


def history(run_dir: Path, to: Path) -> list[records.LogRecord]:
    shutil.copytree(run_dir / "syncer" / "log", to)
    log = RedoLog(to)
    found = [records.decode(record.header) for record in log.records(log.first_lsn)]
    log.close()
    return found


def merged(log: list[records.LogRecord], trained: dict[str, list[S]]) -> list[Counter[S]]:
    """Return how often each sample was merged, per fragment."""
    counts: list[Counter[S]] = [Counter() for _ in range(NUM_FRAGMENTS)]
    for record in log:
        if isinstance(record, records.CommitRecord):
            for merge in record.merges:
                counts[record.fragment].update(trained[merge.session][merge.ready.start : merge.stop])
    return counts


def unleased(log: list[records.LogRecord], trained: dict[str, list[Sample]]) -> set[Sample]:
    """Return the samples that were read without a lease: training does not wait, and such tokens count as repeated."""
    merges = [merge for record in log if isinstance(record, records.CommitRecord) for merge in record.merges]
    return {sample for m in merges for start, stop in m.ready.repeats for sample in trained[m.session][start:stop]}


def names(log: list[records.LogRecord]) -> dict[int, Range]:
    """Return the ranges by number of the lease."""
    leases = [grant.lease for record in log if isinstance(record, records.RangesLeased) for grant in record.grants]
    return {lease.number: (lease.epoch, lease.source, lease.index) for lease in leases}


def leased(log: list[records.LogRecord]) -> set[Range]:
    return set(names(log).values())


def done(log: list[records.LogRecord]) -> Counter[Range]:
    settled = [record for record in log if isinstance(record, records.RangesSettled)]
    return Counter(names(log)[number] for record in settled for number in record.done)


@pytest.mark.chaos
def test_one_learner_then_eight_then_one_with_a_kill_every_sample_is_merged_once_per_epoch(
    processes: Processes,
) -> None:
    syncer = processes.syncer()
    stays = start(processes, "stays")
    processes.until_commits(8)
    others = {name: start(processes, name) for name in (*LEAVING, "dies")}
    until(lambda: contributors(processes.run_dir) == {"stays", *others}, "commits of all eight", processes)
    os.kill(others["dies"].pid, signal.SIGKILL)
    for name in LEAVING:
        (processes.root / f"stop-{name}").touch()
    assert [processes.end(others[name]) for name in LEAVING] == [0] * len(LEAVING)
    alone = {"stays": "stepping", **dict.fromkeys(LEAVING, "left"), "dies": "lapsed"}
    until(lambda: {m["id"]: m["phase"] for m in processes.status()["learners"]} == alone, "the lapse", processes)
    processes.until_commits(40)
    (processes.root / "stop-stays").touch()
    assert processes.end(stays) == 0
    syncer.terminate()
    assert processes.end(syncer) == 0

    summary, trained = processes.summary(), read(processes.root)
    log = history(processes.run_dir, processes.root / "copy")
    counts, ranges = merged(log, trained), done(log)
    assert summary["ledger_exact"]
    assert_recorded_exactly(processes.run_dir)
    assert_tampering_is_seen(processes.run_dir, processes.root / "tampered")
    assert sum(count.total() for count in counts) == summary["tokens_merged"]
    assert len(trained) == summary["joins"] == 8, "nobody began anew"
    assert max(ranges.values()) == 1, "no range is done twice"
    assert summary["ranges_done"] == len(ranges) > 30
    first_open = min(epoch for epoch, *_ in leased(log) - ranges.keys())
    assert first_open >= 1
    for epoch in range(first_open):
        every = {(epoch, source, number) for source, size in enumerate(SIZES) for number in range(size)}
        assert all(every <= count.keys() for count in counts), "an epoch that is over was merged, all of it"
    for epoch, source, index in ranges:
        numbers = range(index * RANGE_SIZE, min((index + 1) * RANGE_SIZE, SIZES[source]))
        assert all(count[epoch, source, number] for count in counts for number in numbers)
    # A lapsed learner had merged parts of its ranges in some fragments. These are merged again, as are samples that
    # were read twice.
    num_repeated = sum(count.total() - len(count) for count in counts)
    assert 0 <= num_repeated <= summary["tokens_repeated"]
    lapsed = {record.session for record in log if isinstance(record, records.Lapsed)}
    assert next(s for s, samples in trained.items() if samples == _samples_of(processes.root, "dies")) in lapsed
    given_back = {sample for session in lapsed for sample in trained[session]}
    again = {sample for count in counts for sample, times in count.items() if times > 1}
    twice = {sample for samples in trained.values() for sample, times in Counter(samples).items() if times > 1}
    assert again <= given_back | twice | unleased(log, trained)


def _samples_of(root: Path, name: str) -> list[Sample]:
    lines = (root / f"{name}.steps").read_text().splitlines()
    return [tuple(sample) for line in lines for sample in json.loads(line)["samples"]]
