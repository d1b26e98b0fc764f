"""Text leased to a learner of two ranks and to one of one process, counted from each rank's records and the redo log.

Trained and leased data are compared by rows: all rows of the text differ, and each has its epoch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from typing import Any

import pytest

from lightning_diloco.protocol.data_ranges import Lease
from lightning_diloco.protocol.syncer import records
from lightning_diloco.storage.tape import read_tape
from tests.e2e.conftest import HERE, Processes, until
from tests.e2e.test_leased_data import contributors, done, history, leased, merged
from tests.e2e.text_learner import RANGE_SIZE, SEQ_LEN, text_data

pytestmark = pytest.mark.slow

BATCH_SIZE, NUM_DOCUMENTS = 2, 10
Row = tuple[int, ...]
Note = dict[str, Any]
Range = tuple[int, int, int]


class Fleet:
    """Learners that train on the same text."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._root = processes, processes.root
        (self._root / "texts").mkdir()
        letters = random.Random(3)
        for index in range(NUM_DOCUMENTS):
            text = "".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=433))
            (self._root / "texts" / f"{index}.txt").write_text(text)
        data = text_data(self._root, BATCH_SIZE)
        data.prepare_data()
        data.setup()
        rows = {tuple(row["input_ids"].tolist()[1:]) for row in data._sequences["train"]}
        self.ranges, self.num_rows = data._ranges, len(rows)
        assert self.num_rows == len(data._sequences["train"]), "no two rows of the text are alike"
        assert self.num_rows % RANGE_SIZE, "the last range is smaller"
        assert RANGE_SIZE % (2 * BATCH_SIZE), "batches cross the borders of ranges"

    def start(self, name: str, *, batch_size: int = BATCH_SIZE, **options: object) -> subprocess.Popen[bytes]:
        (self._root / name).mkdir(exist_ok=True)
        given = {"out": self._root / name / "noted", "until": self._root / "stop", "data": self._root}
        given |= {"store": self._root / "store", "batch-size": batch_size, **options}
        arguments = [text for option, value in given.items() for text in (f"--{option}", value)]
        join = self._processes.address.join_string()
        script = HERE / "text_learner.py"
        return self._processes.start(name, script, *arguments, DILOCO_JOIN=join, DILOCO_LEARNER=name)

    def notes(self, name: str, rank: int) -> list[Note]:
        """Return all complete lines; the last one may be incomplete."""
        path = self._root / name / f"noted.{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def trained(self, name: str, readers: tuple[int, ...]) -> dict[str, list[Row]]:
        """Return the row of each token of the counter, by session; `readers` are ranks with different rows."""
        by_rank = [self.notes(name, rank) for rank in readers]
        sessions = {note["incarnation"]: note["session"] for note in self.notes(name, 0)}
        found: dict[str, list[Row]] = {session: [] for session in sessions.values()}
        for incarnation, session in sessions.items():
            steps = [[note for note in notes if note["incarnation"] == incarnation] for notes in by_rank]
            for batches in zip(*steps, strict=False):  # the last step of a killed learner may be missing on some ranks
                assert len({(note["step"], len(note["rows"])) for note in batches}) == 1, "ranks are at the same place"
                found[session] += [tuple(row) for note in batches for row in note["rows"] for _ in range(SEQ_LEN)]
        return found

    def rows_of(self, where: Range) -> list[Row]:
        """Return rows as read from the text, with the stamp of the epoch."""
        rows, _ = self.ranges.read(Lease(0, *where))
        return [tuple(row) for row in rows.tolist()]

    def kill(self, name: str) -> None:
        """Kill all ranks of a learner at once."""
        for pid in {self.notes(name, rank)[-1]["pid"] for rank in range(2)}:
            os.kill(pid, signal.SIGKILL)

    def tape(self, event: str) -> list[Note]:
        path = self._processes.run_dir / "tape" / "events.jsonl"
        return [line for line in read_tape(path) if line["event"] == event]

    def told(self, learner: str, what: str) -> set[Range]:
        """Return the ranges that this learner has `done` or given `back`."""
        return {tuple(it) for line in self.tape("settled") if line["learner"] == learner for it in line[what]}

    def until_done(self, num_epochs: int) -> None:
        """Wait until this number of epochs is over."""
        every = {where for epoch in range(num_epochs) for where in self.epoch(epoch)}
        until(lambda: every <= self.told("one", "done") | self.told("two", "done"), "the epochs", self._processes)

    def epoch(self, number: int) -> set[Range]:
        """Return all ranges of an epoch."""
        return {(number, 0, index) for index in range(-(-self.num_rows // RANGE_SIZE))}

    def end(self, *learners: subprocess.Popen[bytes], syncer: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Stop the run; return the summary."""
        (self._root / "stop").touch()
        assert [self._processes.end(learner) for learner in learners] == [0] * len(learners)
        syncer.terminate()
        assert self._processes.end(syncer) == 0
        return self._processes.summary()

    def check(self, summary: dict[str, Any], trained: dict[str, list[Row]], *, num_epochs: int) -> None:
        """Check that every range is merged once per epoch, and that further merges are counted as repeated."""
        log = history(self._processes.run_dir, self._root / "copy")
        counts, ranges, open_ranges = merged(log, trained), done(log), leased(log) - done(log).keys()
        assert summary["ledger_exact"]
        assert sum(count.total() for count in counts) == summary["tokens_merged"]
        assert max(ranges.values()) == 1, "no range is done twice"
        assert summary["ranges_done"] == len(ranges)
        assert min(epoch for epoch, *_ in open_ranges) >= num_epochs
        assert all(self.epoch(epoch) <= ranges.keys() for epoch in range(num_epochs)), "an epoch that is over"
        rows = {row for where in ranges for row in self.rows_of(where)}
        assert all(rows <= count.keys() for count in counts), "what is done is merged in every fragment"
        may_be = rows | {row for where in open_ranges for row in self.rows_of(where)}
        assert all(count.keys() <= may_be for count in counts), "nothing is trained without a lease"
        num_surplus = sum(times - SEQ_LEN for count in counts for times in count.values())
        assert 0 <= num_surplus <= summary["tokens_repeated"]
        if not any(isinstance(record, records.Lapsed) for record in log):
            assert summary["tokens_repeated"] == 0, "nobody was away: every row was merged once"


@pytest.mark.parametrize(
    ("inner", "readers", "accumulate"),
    [
        ("auto", (0, 1), 1),
        pytest.param("fsdp2", (0, 1), 1, marks=pytest.mark.thorough),
        pytest.param("auto", (0, 1), 3, marks=pytest.mark.thorough),
        pytest.param("tp", (0,), 1, marks=pytest.mark.thorough),
    ],
)
def test_two_ranks_and_one_process_merge_every_range_once_in_an_epoch(
    processes: Processes, inner: str, readers: tuple[int, ...], accumulate: int
) -> None:
    fleet, syncer = Fleet(processes), processes.syncer()
    two = fleet.start("two", devices=2, inner=inner, accumulate=accumulate)
    one = fleet.start("one", batch_size=3)
    until(lambda: contributors(processes.run_dir) == {"one", "two"}, "commits of both", processes)
    fleet.until_done(2)
    summary = fleet.end(two, one, syncer=syncer)
    log = (processes.root / "two.log").read_text()
    assert "The training data are leased from the run" in log
    trained = {**fleet.trained("two", readers), **fleet.trained("one", (0,))}
    if inner == "tp":
        rows = [[note["rows"] for note in fleet.notes("two", rank)] for rank in range(2)]
        assert rows[0] == rows[1], "ranks that compute together read the same"
    fleet.check(summary, trained, num_epochs=2)


@pytest.mark.chaos
def test_ranges_of_a_killed_learner_of_two_ranks_go_to_others_and_it_returns(processes: Processes) -> None:
    fleet, syncer = Fleet(processes), processes.syncer()
    two, one = fleet.start("two", devices=2), fleet.start("one", batch_size=3)
    until(lambda: contributors(processes.run_dir) == {"one", "two"}, "commits of both", processes)
    until(lambda: fleet.told("two", "done") and fleet.notes("two", 1)[-1]["step"] > 12, "a range of the two", processes)
    fleet.kill("two")
    assert processes.end(two) != 0
    lost = until(lambda: fleet.told("two", "back"), "the lapse", processes)
    until(lambda: lost <= fleet.told("one", "done"), "the lapsed one's ranges, done by the other", processes)

    done_before = fleet.told("two", "done")
    again = fleet.start("two", devices=2)
    until(lambda: fleet.notes("two", 1)[-1]["incarnation"] == 2, "steps of the two that are back", processes)
    until(lambda: fleet.told("two", "done") - done_before, "a range of the two that are back", processes)
    num_lives = {rank: Counter(note["incarnation"] for note in fleet.notes("two", rank)) for rank in range(2)}
    assert num_lives[0].keys() == num_lives[1].keys() == {1, 2}
    lives = [[note for note in fleet.notes("two", 0) if note["incarnation"] == life] for life in (1, 2)]
    began = lives[1][0]["step"]
    assert 5 <= began <= lives[0][-1]["step"], "it goes on from a checkpoint"
    fleet.until_done(1)
    summary = fleet.end(again, one, syncer=syncer)
    fleet.check(summary, {**fleet.trained("two", (0, 1)), **fleet.trained("one", (0,))}, num_epochs=1)
