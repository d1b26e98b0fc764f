"""The memory that exchanging takes on each of two ranks, as measured by the kernel and as stated by the learner."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import HERE, Processes, until

pytestmark = pytest.mark.slow

NUM_STEPS = 180
SLACK = 24 << 20  # connections, threads, and code that is first used during exchanges
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # returns freed memory


def taken(processes: Processes, cut: str, buffers: str) -> list[tuple[int, int]]:
    """Return the bytes that each rank took, and the stated bytes."""
    root = processes.root
    processes.syncer(expect=1, sync_every=6, num_fragments=4, overlap=2)
    join, line = processes.address.join_string(), processes.address.host_port
    ranks = [
        processes.start(
            f"rank{rank}",
            *(HERE / "rank_memory.py", root, rank, 2, line, NUM_STEPS, cut, buffers),
            **{"DILOCO_JOIN": join, **AT_ONCE},
        )
        for rank in range(2)
    ]
    until(lambda: all("joined" in (root / f"rank{rank}.log").read_text() for rank in range(2)), "both", processes)
    (root / "go").touch()
    assert [processes.end(rank) for rank in ranks] == [0, 0]
    until((processes.run_dir / "summary.json").exists, "the summary", processes)
    assert processes.summary()["rounds"] > 8
    found = [json.loads((root / f"memory.{rank}").read_text()) for rank in range(2)]
    print(cut, buffers, found)
    return [(each["peak"] - each["before"], each["stated"]) for each in found]


def test_each_rank_takes_the_stated_memory(processes: Processes) -> None:
    for bytes_taken, stated in taken(processes, "rows", "own"):
        assert 0.6 * stated < bytes_taken < stated + SLACK


@pytest.mark.thorough
def test_ranks_that_gather_fragments_take_more_than_stated(processes: Processes) -> None:
    """This is the control: its buffers are as long as whole fragments."""
    for bytes_taken, stated in taken(processes, "rows", "whole"):
        assert bytes_taken > stated + SLACK
