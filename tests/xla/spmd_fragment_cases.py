"""Fragments over four virtual devices in one process; test_xla_spmd.py starts it."""

from __future__ import annotations

import queue
import random
import threading

import pytest
import torch

from lightning_diloco.core.quantize import encode
from lightning_diloco.devices import xla, xla_layout
from lightning_diloco.devices.base import Update
from lightning_diloco.errors import CorruptMessageError, NonFiniteError
from tests.devices.test_device_fragments import BLOCK, Rig
from tests.xla.test_xla_fragments import fetched_bytes, memory

pytestmark = pytest.mark.xla

NUM_DEVICES = 4
SHAPES = {
    "embedding": (37, 5),  # padded
    "matrix": (24, 128),  # whole blocks on each device
    "units": (12, 48),  # blocks end where devices do not
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
    """Small slices are treated as large ones are."""
    monkeypatch.setattr(xla_layout, "_FEW_ELEMENTS", 100)
    monkeypatch.setattr(xla_layout, "_SMALLEST_UNIT", 4)


class Whole(Rig):
    """The rig of the device tests, with shapes that devices can share."""

    shapes, max_slice_numel = SHAPES, 1024


class Sharded(Whole):
    """Its parameters over all devices."""

    def __init__(self, dtype=torch.float32, **options):
        super().__init__(dtype, "xla", **options)

    def lay_out(self):
        for name, param in self.params.items():
            xla.shard(param, DIMS[name])
        xla.sync()


def train(rig):
    rig.train()
    xla.sync()


def assert_nearly_equal_payloads(rig, p, ours, theirs):
    """Integers differ by one at most; their scales not at all."""
    split = rig.numel(p)
    assert int((ours[:split].view(torch.int8).int() - theirs[:split].view(torch.int8).int()).abs().max()) <= 1
    assert torch.equal(ours[split:], theirs[split:])


@pytest.mark.parametrize(
    ("dtype", "align", "anchor_device"),
    [
        (torch.float32, "carry", "device"),
        (torch.bfloat16, "carry", "host"),
        (torch.float32, "overwrite", "host"),
        (torch.bfloat16, "blend", "device"),
    ],
)
def test_shards_equal_cpu_over_a_random_sequence(dtype, align, anchor_device):
    cpu, sharded = Whole(dtype, align=align), Sharded(dtype, align=align, anchor_device=anchor_device)
    choose = random.Random(0)
    for _ in range(30):
        p, merged = choose.randrange(3), choose.random() < 0.5
        updates = [cpu.published(p) for _ in range(choose.randint(0, 3))]
        _ = [sharded.published(p) for _ in updates]
        sent = {}
        for rig in (cpu, sharded):
            train(rig)
            sent[rig] = rig.contribute(p)
        assert_nearly_equal_payloads(cpu, p, sent[sharded].payload, sent[cpu].payload)
        assert sent[sharded].norm == pytest.approx(sent[cpu].norm, rel=1e-5)
        for rig in (cpu, sharded):
            rig.receive(p, *updates, sent=sent[rig].payload if merged else None)
        assert cpu.device.digest(p) == sharded.device.digest(p)
    tolerance = 2 * torch.finfo(dtype).eps
    assert all(torch.allclose(cpu.local(p), sharded.local(p), rtol=tolerance, atol=tolerance) for p in cpu.fragments)
    assert {name: xla.sharded_dim(param) for name, param in sharded.params.items()} == DIMS


@pytest.mark.parametrize("wire", ["int4", "bf16", "fp32"])
def test_every_precision_of_the_wire_lands_as_on_cpu(wire):
    cpu, sharded = Whole(wire=wire), Sharded(wire=wire)
    for p in cpu.fragments:
        update = cpu.published(p)
        sharded.published(p)
        for rig in (cpu, sharded):
            train(rig)
            payload = rig.contribute(p).payload
            assert rig.decoded(p, payload).any()
            rig.receive(p, update, sent=payload)
        assert cpu.device.digest(p) == sharded.device.digest(p)
        assert torch.allclose(cpu.local(p), sharded.local(p), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_is_removed_exactly_and_a_learner_without_a_step_sends_zero(dtype):
    rig = Sharded(dtype)
    for p in rig.fragments:
        idle = rig.contribute(p)
        assert not idle.payload[: rig.numel(p)].any()
        assert (idle.norm, idle.relative_error) == (0.0, 0.0)
        rig.receive(p, rig.published(p))
        assert torch.equal(rig.local(p), rig.stored(p))
    train(rig)
    for p in rig.fragments:
        before, payload = rig.local(p), rig.contribute(p).payload
        rig.receive(p, sent=payload)
        expected = (before.float() - rig.stored(p).float()) + (rig.stored(p).float() + rig.decoded(p, payload))
        assert torch.equal(rig.local(p, torch.float32), expected.to(dtype).float())


def test_one_byte_for_each_element_comes_from_the_devices():
    rig = Sharded()
    train(rig)
    for p in rig.fragments:
        layout = rig.device._layouts[p]
        elements = layout.num_devices * layout.row_numel
        scales_and_norms = 2 * elements // layout.unit + 2 * 4 * NUM_DEVICES
        assert fetched_bytes(lambda p=p: rig.contribute(p)) <= elements + scales_and_norms
        assert fetched_bytes(lambda p=p: rig.local(p)) == 4 * elements


def test_non_finite_parameters_are_named():
    rig = Sharded()
    with torch.no_grad():
        rig.params["units"].add_(torch.nan)
    xla.sync()
    p = next(p for p in rig.fragments if any(s.name == "units" for s in rig.plan.fragments[p]))
    with pytest.raises(NonFiniteError, match="units"):
        rig.contribute(p)


def test_slices_lie_in_the_shards_of_their_parameters():
    parts = [part for layout in Sharded().device._layouts for part in layout.parts]
    assert {part.entry.slice.name for part in parts if part.is_local} == {"matrix", "units", "bias"}


def test_anchor_is_shown_and_local_values_return():
    rig = Sharded(torch.bfloat16)
    train(rig)
    values = [rig.local(p) for p in rig.fragments]
    rig.device.show_anchor()
    assert [rig.device.encode(rig.device.snapshot(p)).norm for p in rig.fragments] == [0.0] * 3
    assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)
    rig.device.show_local()
    assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)


def test_second_thread_exchanges_shards_while_the_first_trains():
    """300 exchanges, some refused first; nothing is compiled after the first ones."""
    rig, mirror, choose = Sharded(), Whole(), random.Random(1)
    jobs, landings = queue.SimpleQueue(), queue.SimpleQueue()

    def link():
        while (job := jobs.get()) is not None:
            p, snapshot, update, fails = job
            payload = rig.device.encode(snapshot).payload
            if fails:
                with pytest.raises(CorruptMessageError):
                    rig.device.stage(p, Update(None, [update[:-1]], None))
            landings.put((p, update, rig.device.stage(p, Update(None, [update], payload))))

    thread = threading.Thread(target=link)
    thread.start()
    in_flight, warm = set(), 0

    def land():
        p, update, staged = landings.get(timeout=60)
        rig.device.land(p, staged)
        in_flight.discard(p)
        mirror.receive(p, update)

    for k in range(300):
        train(rig)
        p = k % 3
        while p in in_flight or (choose.random() < 0.4 and not landings.empty()):
            land()
        published = encode(torch.zeros(rig.numel(p)).uniform_(-0.1, 0.1), wire="int8", block_size=BLOCK, name="update")
        jobs.put((p, rig.device.snapshot(p), published, choose.random() < 0.2))
        in_flight.add(p)
        warm = xla.num_compilations() if k == 10 else warm
    while in_flight:
        land()
    jobs.put(None)
    thread.join(timeout=60)
    assert xla.num_compilations() == warm
    assert [rig.device.digest(p) for p in rig.fragments] == [mirror.device.digest(p) for p in rig.fragments]


def test_memory_of_each_placement_is_stated_for_each_device():
    assert memory(dim=1, anchor_device="host") == (
        "anchor_device='host': anchors take 1.0 MiB of each of 4 device(s) as 'device', 4.0 MiB of host memory as "
        "'host'; residuals take 0.0 MiB of each device, an exchange up to 0.8 MiB"
    )
