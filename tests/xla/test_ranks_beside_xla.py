"""Learners of several ranks with the oldest allowed torch, which torch_xla needs; they use no XLA device."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Processes
from tests.e2e.test_ranks import PACED, ends_alike

pytestmark = pytest.mark.xla


def test_ranks_give_the_anchors_of_one_device_although_fsdp2_moves_uneven_shards(processes: Processes) -> None:
    """At the first forward, torch 2.9 moves the shards of the last layer, which has three rows."""
    layouts = {"one": (), "ddp": ("--devices", 2), "fsdp2": ("--devices", 2, "--inner", "fsdp2")}
    for name, layout in layouts.items():
        assert processes.end(processes.trainer(name, *PACED, *layout)) == 0
    (one,) = processes.ranks_held("one")
    for name in ("ddp", "fsdp2"):
        for held in processes.ranks_held(name):
            assert ends_alike(one, held)
