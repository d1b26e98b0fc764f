"""One XLA device compared with the CPU; fragment_cases.py has the tests that a mesh shares."""

from __future__ import annotations

import pytest
import torch

from lightning_diloco.core.digest import digest
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.xla import ops as xla
from lightning_diloco.errors import CorruptMessageError
from tests.devices.rig import BLOCK, Rig
from tests.xla.fragment_cases import DTYPES, PLACES, FragmentCases, OnXla, memory

pytestmark = pytest.mark.xla


class TestOnOneDevice(FragmentCases):
    on_cpu, on_xla = Rig, OnXla

    @pytest.mark.parametrize("anchor_device", PLACES)
    @pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_xla_equals_cpu_over_a_random_sequence(self, dtype, align, anchor_device):
        self.is_equal_to_cpu_over_a_random_sequence(dtype, align=align, anchor_device=anchor_device)


class Few(Rig):
    """Few parameters, each in several slices of a fragment."""

    shapes, max_slice_numel = {f"layer{k}": (24, BLOCK) for k in range(4)}, BLOCK


class FewOnXla(OnXla):
    """Few parameters on XLA."""

    shapes, max_slice_numel = Few.shapes, Few.max_slice_numel


def test_slices_of_different_parameters_are_not_confused():
    cpu, device = Few(num_fragments=7), FewOnXla(num_fragments=7)
    fragments = device.plan.fragments
    of_names = {tuple(s.name for s in slices) for slices in fragments}
    assert len(of_names) > len({len(slices) for slices in fragments}), "some differ in nothing but the parameters"
    for p in cpu.fragments:
        update, _ = (rig.published(p) for rig in (cpu, device))
        for rig in (cpu, device):
            rig.train()
            rig.receive(p, update, sent=rig.contribute(p).payload)
        assert digest(cpu.device.anchor(p)) == digest(device.device.anchor(p))
        assert torch.allclose(cpu.local(p), device.local(p), rtol=0, atol=1e-6)


def test_rows_of_equal_shape_share_their_graphs_at_any_position():
    tensor, starts = xla.upload(torch.arange(24.0).view(12, 2), torch.tensor(0, dtype=torch.int32))
    for start in range(0, 12, 3):
        (at,) = xla.upload(torch.tensor(start, dtype=torch.int32))
        rows = xla.rows_of(tensor, at, 3) * -1
        xla.sync()
        changed = xla.with_rows(tensor, rows, at)
        xla.sync()
        starts = starts if start else xla.num_compilations()
        expected = torch.arange(24.0).view(12, 2)
        expected[start : start + 3] *= -1
        assert torch.equal(changed.cpu(), expected)
    assert xla.num_compilations() == starts


def test_bad_updates_are_refused():
    rig = OnXla()
    good = rig.published(0)
    bad = [
        Update(None, [good[:-1]], None),
        Update(None, [good, torch.full_like(good, 0xFF)], None),
        Update(None, (), good[1:]),
        Update(rig.device.anchor(0).index_fill(0, torch.tensor([3]), torch.nan), (), None),
    ]
    before = digest(rig.device.anchor(0))
    for update in bad:
        with pytest.raises(CorruptMessageError):
            rig.device.stage(0, update)
    assert digest(rig.device.anchor(0)) == before


def test_memory_of_each_placement_is_stated():
    anchors = "anchors take 4.0 MiB of each of 1 device(s) as 'device', 4.0 MiB of host memory as 'host'"
    assert memory() == (
        f"anchor_device='device': {anchors}; residuals take 0.0 MiB of each device, an exchange up to 3.0 MiB"
    )
    assert memory(anchor_device="host", align="overwrite") == (
        f"anchor_device='host': {anchors}; residuals take 4.0 MiB of each device, an exchange up to 3.0 MiB"
    )
