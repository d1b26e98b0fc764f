"""Texts and payloads of any length from rank 0 to the others over a real group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch, torch.distributed as dist
from lightning_diloco.learner.ranks.channel import Channel

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
channel = Channel()
for length in (0, 1, *range(470, 520), 5000):  # around a frame's end
    for numel in (None, 0, 1, 1000):
        text, payload = {"said": "x" * length}, None if numel is None else torch.arange(numel).to(torch.uint8)
        if rank == 0:
            channel.tell(text, payload)
        else:
            heard, got = channel.hear()
            assert heard == text and got.tolist() == ([] if payload is None else payload.tolist()), (length, numel)
        assert channel.all_could(True)
channel.close()
dist.destroy_process_group()
"""


def test_a_received_text_equals_the_sent_one(tmp_path: Path) -> None:
    argv = [[sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")] for rank in range(2)]
    processes = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in argv]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
