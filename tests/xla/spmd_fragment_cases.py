"""Fragments over four virtual devices in one process; test_xla_spmd.py starts it."""

from __future__ import annotations

import pytest
import torch

from lightning_diloco.devices.xla import layout
from lightning_diloco.devices.xla import ops as xla
from tests.devices.rig import Rig
from tests.xla.fragment_cases import FragmentCases, OnXla, memory

pytestmark = pytest.mark.xla

NUM_DEVICES = 4
SHAPES = {
    "embedding": (37, 5),  # padded
    "matrix": (24, 128),  # whole blocks on each device
    "units": (12, 48),  # blocks do not end at device boundaries
    "conv": (4, 3, 2, 2),
    "bias": (64,),
    "odd": (11,),
    "scalar": (),
}
DIMS = {"embedding": 0, "matrix": 1, "units": 1, "conv": 0, "bias": 0, "odd": 0, "scalar": None}


@pytest.fixture(scope="module", autouse=True)
def _mesh():
    assert xla.use_mesh() == NUM_DEVICES


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    """Treat small slices like large ones."""
    monkeypatch.setattr(layout, "_FEW_ELEMENTS", 100)
    monkeypatch.setattr(layout, "_SMALLEST_UNIT", 4)


class Whole(Rig):
    """The rig of the device tests, with shapes that can be sharded."""

    shapes, max_slice_numel = SHAPES, 1024


class Sharded(OnXla):
    """The rig with parameters sharded over all devices."""

    shapes, max_slice_numel = SHAPES, 1024

    def lay_out(self):
        for name, param in self.params.items():
            xla.shard(param, DIMS[name])
        xla.sync()


class TestOnAMesh(FragmentCases):
    on_cpu, on_xla = Whole, Sharded

    @pytest.mark.parametrize(
        ("dtype", "align", "anchor_device"),
        [
            (torch.float32, "carry", "device"),
            (torch.bfloat16, "carry", "host"),
            (torch.float32, "overwrite", "host"),
            (torch.bfloat16, "blend", "device"),
        ],
    )
    def test_shards_equal_cpu_over_a_random_sequence(self, dtype, align, anchor_device):
        sharded = self.is_equal_to_cpu_over_a_random_sequence(dtype, align=align, anchor_device=anchor_device)
        assert {name: xla.sharded_dim(param) for name, param in sharded.params.items()} == DIMS


def test_slices_are_in_the_shards_of_their_parameters():
    parts = [part for layout in Sharded().device._layouts for part in layout.parts]
    assert {part.entry.slice.name for part in parts if part.is_local} == {"matrix", "units", "bias"}


def test_memory_of_each_placement_is_stated_for_each_device():
    assert memory(dim=1, anchor_device="host") == (
        "anchor_device='host': anchors take 1.0 MiB of each of 4 device(s) as 'device', 4.0 MiB of host memory as "
        "'host'; residuals take 0.0 MiB of each device, an exchange up to 0.8 MiB"
    )
