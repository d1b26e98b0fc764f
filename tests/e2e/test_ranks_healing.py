"""Learners of two ranks are killed and preempted: all ranks restart with the state of their checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.storage.tape import read_tape
from tests.alive import is_running
from tests.e2e.conftest import HERE, Processes, until

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

Note = dict[str, Any]
NAME, PREEMPTED = "healer", 143
HELD = ("moments", "rate", "random", "python")


class Healer:
    """One learner, which is restarted several times."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._folder = processes, processes.root / NAME
        self._folder.mkdir()
        processes.syncer(sync_every=4, num_fragments=2, overlap=1)

    def start(self, inner: str) -> subprocess.Popen[bytes]:
        arguments = ("--out", self._folder / "noted", "--inner", inner, "--store", self._processes.root / "store")
        join = self._processes.address.join_string()
        return self._processes.start(NAME, HERE / "healer.py", *arguments, DILOCO_JOIN=join, DILOCO_LEARNER=NAME)

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until all of its processes have ended; return the exit code."""
        code = self._processes.end(process)
        pids = [next(iter(life.values()))["pid"] for rank in range(2) for life in self.lives(rank, "begins")]
        until(lambda: not any(map(is_running, pids)), "the end of all ranks", self._processes)
        return code

    def lives(self, rank: int, at: str) -> list[dict[int, Note]]:
        """Return the records of each process of a rank at the start or end of a step, by step."""
        lives = dict[int, dict[int, Note]]()
        for note in self.notes(rank):
            if note["at"] == at:
                lives.setdefault(note["pid"], {})[note["step"]] = note
        return list(lives.values())

    def notes(self, rank: int) -> list[Note]:
        """Return all complete lines; the last one may be incomplete."""
        path = Path(f"{self._folder}/noted.{rank}.jsonl")
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def kill(self, rank: int) -> None:
        os.kill(self.notes(rank)[-1]["pid"], signal.SIGKILL)

    def until_kept(self, num: int) -> None:
        until(lambda: len(self.entries()) >= num, f"{num} checkpoints", self._processes)

    def entries(self) -> list[Any]:
        return self.store.entries(NAME)

    @property
    def store(self) -> CheckpointStore:
        (folder,) = [*self._processes.root.glob("store/*")] or [self._processes.root / "store" / "none"]
        return CheckpointStore(str(folder))

    def came_back_at(self, life: int) -> int:
        """Check the restored state of each rank, and that the learner contributes again; return the step."""
        until(lambda: all(len(self.lives(rank, "begins")) > life for rank in range(2)), "its return", self._processes)
        self._processes.until_commits(4)
        now = [self.lives(rank, "begins")[life] for rank in range(2)]
        before = [self.lives(rank, "ended")[life - 1] for rank in range(2)]
        step = min(now[0])
        for rank in range(2):
            assert min(now[rank]) == step
            for name in HELD:
                assert now[rank][step][name] == before[rank][step][name], f"rank {rank} goes on with other {name}"
            assert now[rank][step]["num_numbers"] > 0, "there is something to restore"
            read = {sample for k, note in before[rank].items() if k <= step for sample in note["samples"]}
            assert not read & {sample for note in now[rank].values() for sample in note["samples"]}, "the epoch goes on"
        return step

    def leaves_when_asked(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM to the started process; all ranks must leave after the same step, with a checkpoint of it."""
        process.terminate()
        assert self.end(process) == PREEMPTED
        steps_done = {max(self.lives(rank, "ended")[-1]) for rank in range(2)}
        assert steps_done == {self.entries()[0].step}
        until(lambda: leaves(self._processes) == ["preempted"], "the leave on the tape", self._processes)


def leaves(processes: Processes) -> list[str]:
    """Return the reasons of all leaves, in order; a killed learner does not leave."""
    path = processes.run_dir / "tape" / "events.jsonl"
    return [line["reason"] for line in read_tape(path) if line["event"] == "leave" and line["reason"] != "failed"]


@pytest.mark.parametrize(
    ("killed", "again"), [("ddp", "spawn"), pytest.param("fsdp", "fsdp", marks=pytest.mark.thorough)]
)  # spawn has the layout of ddp
def test_a_killed_learner_restarts_with_its_whole_state_and_leaves_after_sigterm(
    processes: Processes, killed: str, again: str
) -> None:
    healer = Healer(processes)
    process = healer.start(killed)
    healer.until_kept(2)
    healer.kill(rank=1)
    assert healer.end(process) not in (0, PREEMPTED)

    process = healer.start(again)
    assert healer.came_back_at(1) >= 10
    healer.leaves_when_asked(process)


def test_a_killed_fsdp2_learner_with_a_torn_part_uses_the_previous_checkpoint(processes: Processes) -> None:
    healer = Healer(processes)
    process = healer.start("fsdp2")
    healer.until_kept(2)
    healer.kill(rank=0)
    assert healer.end(process) not in (0, PREEMPTED)
    newest, older, *_ = healer.entries()
    (torn,) = Path(healer.store.url, NAME, "parts").glob(f"1-{healer.store.read(newest).parts[1]}.*")
    torn.write_bytes(torn.read_bytes()[:-9])

    process = healer.start("fsdp2")
    assert healer.came_back_at(1) == older.step
    halves = [healer.lives(rank, "ended")[0][older.step] for rank in range(2)]
    assert halves[0]["moments"] != halves[1]["moments"], "each rank has its own"
    healer.leaves_when_asked(process)
