"""Rows from rank 0 to all ranks over real groups, sent in advance; rows in transit do not delay the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SHARES = [0, 1, 1]  # the last two compute together
NUM_GIVEN, NUM_TAKEN = 9, 5
SCRIPT = f"""
import json, sys
import torch, torch.distributed as dist
from lightning_diloco.learner.ranks.group import Ranks

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size={len(SHARES)})
ranks, found = Ranks(), []
for num_batch in (4, 6):  # a second loader may have batches of another size
    handout = ranks.hand_out({SHARES})
    if rank == 0:
        batches = [torch.arange(num_batch * 3).reshape(num_batch, 3) + 100 * n for n in range({NUM_GIVEN})]
        own = [handout.give(batch.to(torch.int32)) for batch in batches][:{NUM_TAKEN}]
    else:
        own = [handout.take() for _ in range({NUM_TAKEN})]
    found.append([rows.tolist() for rows in own])
    dist.barrier()
ranks.close()
print(json.dumps(found))
"""


def test_each_rank_gets_its_rows_in_order_and_unread_rows_do_not_delay_the_end(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(len(SHARES))
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(SHARES)
    for share, output in zip(SHARES, told, strict=True):
        for num_batch, taken in zip((4, 6), json.loads(output), strict=True):
            rows = [[[100 * n + 3 * row + k for k in range(3)] for row in range(num_batch)] for n in range(NUM_TAKEN)]
            assert taken == [batch[share::2] for batch in rows]
