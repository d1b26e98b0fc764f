"""The parts of two ranks together give the same bits as one device, and each holds half as much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan, gather
from lightning_diloco.core.quantize import Decoder, decode, encode_fragment
from lightning_diloco.devices import part as part_module
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.devices.part import Box, CpuPart, PartPlan, assemble

SHAPES = {"table": (37, 6), "narrow": (5,), "scalar": (), "cube": (9, 2, 3)}
CUT_ROWS: list[dict[str, Box]] = [
    {"table": ((0, 0), (19, 6)), "narrow": ((0,), (5,)), "scalar": ((), ()), "cube": ((0, 0, 0), (5, 2, 3))},
    {"table": ((19, 0), (18, 6)), "narrow": ((5,), (0,)), "scalar": ((), ()), "cube": ((5, 0, 0), (4, 2, 3))},
]
CUT_COLUMNS: list[dict[str, Box]] = [
    {**CUT_ROWS[0], "table": ((0, 0), (37, 2)), "cube": ((0, 0, 0), (9, 1, 3))},
    {**CUT_ROWS[1], "table": ((0, 2), (37, 4)), "cube": ((0, 1, 0), (9, 1, 3))},
]
CUT_ELEMENTS: list[dict[str, Box]] = [
    {"table": ((0,), (100,)), "narrow": ((0,), (0,)), "scalar": ((), ()), "cube": ((0,), (54,))},
    {"table": ((100,), (122,)), "narrow": ((0,), (5,)), "scalar": ((), ()), "cube": ((0,), (0,))},
]
CUT_NOTHING: list[dict[str, Box]] = [  # the second rank has only the scalar, and nothing of one fragment
    {name: (tuple(0 for _ in shape), shape) for name, shape in SHAPES.items()},
    {name: (tuple(0 for _ in shape), tuple(0 for _ in shape)) for name, shape in SHAPES.items()},
]
CUTS = pytest.mark.parametrize(
    "boxes", [CUT_ROWS, CUT_COLUMNS, CUT_ELEMENTS, CUT_NOTHING], ids=["rows", "columns", "elements", "nothing"]
)


def own(tensor: Tensor, box: Box) -> Tensor:
    if len(box[0]) == 1:
        tensor = tensor.view(-1)
    for dim, (first, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, first, size)
    return tensor.clone()


@CUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire", ["int8", "fp32"])
@pytest.mark.parametrize("num_behind", [0, 1])
def test_parts_exchange_the_same_as_one_device(boxes, dtype, wire, num_behind):
    config = RunConfig(sync_every=4, num_fragments=2, wire=wire, block_size=16, max_slice_numel=100)
    plan = FragmentPlan.balanced(SHAPES, num_fragments=2, max_slice_numel=100)
    drawn = torch.Generator().manual_seed(1)
    params = {name: torch.randn(shape, generator=drawn).to(dtype) for name, shape in SHAPES.items()}
    one = CpuFragments(plan, params, config, LearnerConfig())
    held = [{name: own(params[name], each[name]) for name in SHAPES} for each in boxes]
    parts = [CpuPart(plan, h, config, LearnerConfig(), each) for h, each in zip(held, boxes, strict=True)]
    plans = [PartPlan(plan, each, 16) for each in boxes]

    for p in range(plan.num_fragments):
        start_P = one.local_values(p)
        assert torch.equal(assemble(plans, p, [part.local_values(p) for part in parts]), start_P)
        for device in (one, *parts):
            device.adopt(p, start_P)
    for name, param in params.items():  # all ranks train alike
        step = torch.randn(param.shape, generator=drawn).to(dtype)
        param.add_(step)
        for h, each in zip(held, boxes, strict=True):
            h[name].add_(own(step, each[name]))

    for p in range(plan.num_fragments):
        sent = one.encode(one.snapshot(p)).payload
        wanted_P = assemble(plans, p, [part.delta(part.snapshot(p)) for part in parts])
        assert torch.equal(encode_fragment(plan.layout(p, 16), wanted_P, wire, 16), sent)

        noise = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
        update_P = gather(plan.layout(p, 16), noise, torch.empty_like(wanted_P))
        chain = (encode_fragment(plan.layout(p, 16), update_P, wire, 16), *(sent,) * num_behind)
        for device in (one, *parts):
            device.land(p, device.stage(p, Update(None, chain, sent)))
        assert torch.equal(assemble(plans, p, [part.anchor(p) for part in parts]), one.anchor(p))
    for h, each in zip(held, boxes, strict=True):
        assert all(torch.equal(h[name], own(params[name], each[name])) for name in SHAPES)


@CUTS
@pytest.mark.parametrize("wire", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("chunk", [1, 40, 1 << 18])
def test_a_part_decodes_to_the_bits_of_the_whole_and_reads_little_more(boxes, wire, chunk, monkeypatch):
    monkeypatch.setattr(part_module, "CHUNK_NUMEL", chunk)
    num_read = 0
    read = Decoder.read

    def counted(self: Decoder, start: int, out: Tensor) -> Tensor:
        nonlocal num_read
        num_read += out.numel()
        return read(self, start, out)

    config = RunConfig(sync_every=4, num_fragments=1, overlap=1, wire=wire, block_size=16)
    plan = FragmentPlan.balanced(SHAPES, num_fragments=1, max_slice_numel=1 << 20)
    values_P = torch.randn(plan.layout(0, 16).padded_numel, generator=torch.Generator().manual_seed(1))
    encoded = encode_fragment(plan.layout(0, 16), values_P, wire, 16)
    whole_P = decode(encoded, numel=values_P.numel(), wire=wire, block_size=16)
    monkeypatch.setattr(Decoder, "read", counted)
    for each in boxes:
        own = PartPlan(plan, each, 16)
        num_read = 0
        found_L = own.decoded(0, encoded, config)
        assert torch.equal(found_L, own.cut(0, whole_P))
        if chunk == 1 << 18 and boxes is not CUT_COLUMNS:
            assert num_read < found_L.numel() + 2 * 16 * len(SHAPES)


def test_each_rank_holds_only_its_part():
    config = RunConfig(sync_every=4, num_fragments=1, overlap=1, block_size=16)
    boxes: list[dict[str, Box]] = [{"a": ((0, 0), (64, 32))}, {"a": ((64, 0), (64, 32))}]
    plan = FragmentPlan.balanced({"a": (128, 32)}, num_fragments=1, max_slice_numel=1 << 20)
    part = CpuPart(plan, {"a": torch.zeros(64, 32)}, config, LearnerConfig(), boxes[0])
    assert part.anchor(0).numel() == 64 * 32
    assert all(buffer.numel() == 64 * 32 for buffer in (*part._anchors, *part._spare))


def test_an_anchor_can_be_shown_and_hidden():
    config = RunConfig(sync_every=4, num_fragments=1, overlap=1, block_size=16)
    plan = FragmentPlan.balanced({"a": (4, 2)}, num_fragments=1, max_slice_numel=1 << 20)
    held = {"a": torch.zeros(2, 2)}
    part = CpuPart(plan, held, config, LearnerConfig(), {"a": ((2, 0), (2, 2))})
    part.adopt(0, torch.arange(16.0))
    held["a"].fill_(9)
    part.show_anchor()
    assert torch.equal(held["a"], torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    part.show_local()
    assert torch.equal(held["a"], torch.full((2, 2), 9.0))
