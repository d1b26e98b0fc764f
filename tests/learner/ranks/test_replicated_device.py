"""Messages of rank 0 to the other ranks: whole updates, and agreements as sums."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.part import CpuPart
from lightning_diloco.learner.ranks.agreement import Agreement
from lightning_diloco.learner.ranks.replicated_device import ReplicatedDevice, packed, unpacked
from lightning_diloco.learner.ranks.sharded_device import ShardedDevice

BYTES = torch.arange(12, dtype=torch.uint8)
VALUES = torch.linspace(-1, 1, 7)


@pytest.mark.parametrize("full", [None, VALUES])
@pytest.mark.parametrize("chain", [(), (BYTES[:5],), (BYTES[:5], BYTES[5:9])])
@pytest.mark.parametrize("sent", [None, BYTES[2:]])
def test_an_update_travels_unchanged(full, chain, sent):
    command, payload = packed(3, Update(full, chain, sent))
    found = unpacked(command, payload.clone())
    assert command["fragment"] == 3
    assert len(found.chain) == len(chain)
    pairs = [(found.full, full), (found.sent, sent), *zip(found.chain, chain, strict=True)]
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def test_an_agreement_is_the_sum_over_ranks():
    leader = Agreement(tokens=5, is_last=True, land=(0, 2), snapshot=(1,))
    follower = Agreement(tokens=7, num_failed=1)
    sums = [a + b for a, b in zip(leader.numbers(3), follower.numbers(3), strict=True)]
    assert Agreement.of(sums) == Agreement(tokens=12, num_failed=1, is_last=True, land=(0, 2), snapshot=(1,))


@pytest.mark.parametrize("kind", [ReplicatedDevice, ShardedDevice])
def test_ranks_that_send_equal_bytes_copy_at_the_boundary(kind):
    """Otherwise one rank could copy before a callback changes parameters, and another rank after it."""
    plan, config = FragmentPlan.balanced({"w": (8, 4)}, num_fragments=1, max_slice_numel=99), RunConfig(block_size=16)
    params, boxes = {"w": torch.ones(8, 4)}, [{"w": ((0, 0), (8, 4))}]
    own = CpuPart(plan, params, config, LearnerConfig(), boxes[0])
    options = {"plan": plan, "config": config, "boxes": boxes, "stopping": threading.Event()}
    device = kind(own, SimpleNamespace(num_begun=1, rank=0, size=1), **options)
    device.make((), (0,))
    _, snapshot = device.snapshot(0)
    params["w"].zero_()
    own.settle()
    assert float(snapshot.buffer[0]) == (1.0 if kind is ReplicatedDevice else 0.0)
