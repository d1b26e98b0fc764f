"""The memory that a rank states equals that of its device."""

from __future__ import annotations

import pytest
import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.devices.part import Box, CpuPart, PartPlan
from lightning_diloco.learner.ranks.memory import footprint

SHAPES = {"a": (65, 32), "b": (7, 32)}
BOXES: list[dict[str, Box]] = [
    {"a": ((0, 0), (33, 32)), "b": ((0, 0), (4, 32))},
    {"a": ((33, 0), (32, 32)), "b": ((4, 0), (3, 32))},
]
PLAN = FragmentPlan.balanced(SHAPES, num_fragments=2, max_slice_numel=1 << 20)
CONFIG = RunConfig(sync_every=4, num_fragments=2, overlap=1, block_size=16)


@pytest.mark.parametrize("boxes", [None, *BOXES], ids=["whole", "upper", "lower"])
def test_anchors_and_buffers_agree_with_the_device(boxes):
    learner = LearnerConfig()
    if boxes is None:
        device = CpuFragments(PLAN, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, CONFIG, learner)
    else:
        params = {name: torch.zeros(box[1]) for name, box in boxes.items()}
        device = CpuPart(PLAN, params, CONFIG, learner, boxes)
    part = None if boxes is None else PartPlan(PLAN, boxes, CONFIG.block_size)
    found = footprint(PLAN, CONFIG, learner, rank=1, size=2, part=part)
    assert found.anchors == sum(anchor.nbytes for anchor in device._anchors)
    assert found.buffers == sum(buffer.nbytes for buffer in device._spare)
    assert found.residuals == 0


def test_rank_0_keeps_the_sent_bytes_of_all_ranks():
    first, other = (footprint(PLAN, CONFIG, LearnerConfig(), rank=rank, size=2, part=None) for rank in range(2))
    numel = sum(PLAN.layout(p, 16).padded_numel for p in range(2))
    assert first.sent == numel + 2 * numel // 16
    assert other.sent == first.sent // 2
    assert other.peak < first.peak


def test_residuals_are_counted_if_a_landing_discards_progress():
    found = footprint(PLAN, CONFIG, LearnerConfig(align="overwrite"), rank=0, size=2, part=None)
    assert found.residuals == 2 * found.anchors
    assert "residuals" in str(found)
    assert "residuals" not in str(footprint(PLAN, CONFIG, LearnerConfig(), rank=0, size=2, part=None))
