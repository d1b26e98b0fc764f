"""Bytes at the sockets of two ranks: each uploads about half of every contribution, unless one rank cannot upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_diloco.transport.faults import FaultProxy
from tests.e2e.conftest import HERE, Processes, until

pytestmark = pytest.mark.slow

NUM_STEPS = 60
PAYLOAD_BYTES = 1 << 20  # bytes of one round of all fragments, without scales


def bytes_up(processes: Processes, cut: str, *, is_cut: bool) -> list[int]:
    """Return the bytes that each of two ranks sent after both had joined."""
    root: Path = processes.root
    processes.syncer(expect=1, sync_every=6, num_fragments=2, overlap=2, block_size=256)
    lines = [FaultProxy(processes.address.host_port).start() for _ in range(2)]
    try:
        join = processes.address.join_string()
        script = (HERE / "two_ranks.py", root)
        ranks = [
            processes.start(f"rank{rank}", *script, rank, 2, line, NUM_STEPS, cut, DILOCO_JOIN=join)
            for rank, line in enumerate((lines[0].address, "cut" if is_cut else lines[1].address))
        ]
        until(lambda: all("joined" in (root / f"rank{rank}.log").read_text() for rank in range(2)), "both", processes)
        before = [line.bytes_up for line in lines]
        (root / "go").touch()
        assert [processes.end(rank) for rank in ranks] == [0, 0]
        return [line.bytes_up - start for line, start in zip(lines, before, strict=True)]
    finally:
        for line in lines:
            line.stop()


def check(processes: Processes, sent: list[int]) -> int:
    """Check that all work was merged and that no output has the token; return the bytes."""
    until((processes.run_dir / "summary.json").exists, "the summary", processes)
    summary = processes.summary()
    assert (summary["status"], summary["ledger_exact"]) == ("finished", True)
    assert summary["tokens_merged"] == summary["tokens_seen"] > 0
    assert processes.address.token not in processes.logs()
    return sum(sent)


@pytest.mark.parametrize("cut", ["whole", "rows"])
def test_each_rank_uploads_half_of_every_contribution(processes: Processes, cut: str) -> None:
    sent = bytes_up(processes, cut, is_cut=False)
    assert check(processes, sent) > PAYLOAD_BYTES
    if cut == "whole":
        digests = [(processes.root / f"digests.{rank}").read_text() for rank in range(2)]
        assert digests[0] == digests[1]
    print(f"{cut}: bytes by rank {sent}")
    assert abs(sent[0] - sent[1]) < 0.1 * max(sent)
    assert "rank 0 uploads" not in processes.logs()


def test_rank_0_uploads_everything_if_another_rank_cannot(processes: Processes) -> None:
    sent = bytes_up(processes, "rows", is_cut=True)
    assert check(processes, sent) > PAYLOAD_BYTES
    assert sent[1] == 0
    assert "ranks [1] cannot reach the syncer; rank 0 uploads the contributions of all ranks" in processes.logs()
