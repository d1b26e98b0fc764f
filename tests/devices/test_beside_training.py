"""Threads that copy parameters do not deadlock with threads that train them.

PyTorch takes a parameter's lock and the interpreter's lock in both orders, so a thread beside training must not index a
parameter. When a thread did, this test deadlocked within 300 rounds.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import faulthandler, sys, threading
import torch
from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.cpu import CpuFragments

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)  # threads take turns at any moment
params = {f"w{k}": torch.nn.Parameter(torch.randn(16, 8)) for k in range(8)}
plan = FragmentPlan.balanced({name: (16, 8) for name in params}, num_fragments=1, max_slice_numel=1024)
config = RunConfig(num_fragments=1, sync_every=6, block_size=16)
device, rounds_over = CpuFragments(plan, params, config, LearnerConfig()), threading.Event()
device.adopt(0, device.local_values(0))

def beside():
    while not rounds_over.is_set():
        device.settle()

threads = [threading.Thread(target=beside) for _ in range(2)]
for thread in threads:
    thread.start()
for n in range(1000):
    snapshot = device.snapshot(0)
    for param in params.values():
        param.abs()  # a forward: autograd makes, and lets go of, what accumulates the gradient
    device.settle()
    device.encode(snapshot)
    device.land(0, device.stage(0, Update(full=device.anchor(0), chain=(), sent=None)))
rounds_over.set()
for thread in threads:
    thread.join()
print("rounds:", n + 1)
"""


def test_a_forward_beside_copies_and_landings_does_not_deadlock() -> None:
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout == "rounds: 1000\n", found.stderr[-4000:]
