"""One XLA device against the CPU: the same contributions, landings and anchors, without recompilation."""

from __future__ import annotations

import queue
import random
import threading

import pytest
import torch
from torch_xla.debug import metrics

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import encode
from lightning_diloco.devices import xla
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.xla_fragments import XlaFragments
from lightning_diloco.errors import CorruptMessageError, NonFiniteError
from tests.devices.test_device_fragments import BLOCK, Rig

pytestmark = pytest.mark.xla

DTYPES = [torch.float32, torch.bfloat16]
PLACES = ["device", "host"]


def xla_rig(dtype=torch.float32, **learner):
    rig = Rig(dtype, "xla", **learner)
    xla.sync()
    return rig


def train(rig):
    rig.train()
    xla.sync()


def integers(rig, p, payload):
    return payload[: rig.numel(p)].view(torch.int8).int()


@pytest.mark.parametrize("anchor_device", PLACES)
@pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_xla_equals_cpu_over_a_random_sequence(dtype, align, anchor_device):
    cpu, device = Rig(dtype, align=align), xla_rig(dtype, align=align, anchor_device=anchor_device)
    choose, epsilon = random.Random(0), 2 * torch.finfo(dtype).eps
    for _ in range(30):
        p, merged = choose.randrange(3), choose.random() < 0.5
        updates = [cpu.published(p) for _ in range(choose.randint(1, 3))]
        _ = [device.published(p) for _ in updates]  # keeps both generators in step
        sent = {}
        for rig in (cpu, device):
            train(rig)
            sent[rig] = rig.contribute(p)
        q_cpu, q_xla = (integers(rig, p, sent[rig].payload) for rig in (cpu, device))
        assert int((q_cpu - q_xla).abs().max()) <= 1
        assert sent[device].norm == pytest.approx(sent[cpu].norm, rel=1e-5)
        assert sent[device].relative_error == pytest.approx(sent[cpu].relative_error, rel=1e-3)
        for rig in (cpu, device):
            rig.receive(p, *updates, sent=sent[rig].payload if merged else None)
        assert cpu.device.digest(p) == device.device.digest(p)
    for p in cpu.fragments:
        assert torch.allclose(cpu.local(p), device.local(p), rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize("wire", ["int4", "bf16", "fp32"])
def test_every_precision_of_the_wire_lands_as_on_cpu(wire):
    cpu, device = Rig(wire=wire), xla_rig(wire=wire)
    for p in cpu.fragments:
        update = cpu.published(p)
        device.published(p)
        for rig in (cpu, device):
            train(rig)
            payload = rig.contribute(p).payload
            assert rig.decoded(p, payload).any()
            rig.receive(p, update, sent=payload)
        assert cpu.device.digest(p) == device.device.digest(p)
        assert torch.allclose(cpu.local(p), device.local(p), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_progress_removed_is_exactly_what_was_sent(dtype):
    rig = xla_rig(dtype)
    train(rig)
    for p in rig.fragments:
        before, payload = rig.local(p), rig.contribute(p).payload
        rig.receive(p, sent=payload)
        expected = (before.float() - rig.stored(p).float()) + (rig.stored(p).float() + rig.decoded(p, payload))
        assert torch.equal(rig.local(p, torch.float32), expected.to(dtype).float())


@pytest.mark.parametrize("anchor_device", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_learner_without_a_step_contributes_exactly_zero(dtype, anchor_device):
    rig = xla_rig(dtype, anchor_device=anchor_device)
    for round_ in range(3):
        for p in rig.fragments:
            encoded = rig.contribute(p)
            assert not encoded.payload[: rig.numel(p)].any()
            assert (encoded.norm, encoded.relative_error) == (0.0, 0.0)
            rig.receive(p, rig.published(p), sent=encoded.payload if round_ % 2 else None)
            assert torch.equal(rig.local(p), rig.stored(p))


@pytest.mark.parametrize("anchor_device", PLACES)
def test_nothing_is_compiled_after_every_fragment_was_exchanged_once(anchor_device):
    rig, choose = xla_rig(anchor_device=anchor_device), random.Random(0)

    def exchange(p):
        train(rig)
        payload = rig.contribute(p).payload
        chain = [rig.published(p) for _ in range(choose.randint(0, 3))]
        full = choose.choice([None, rig.device.anchor(p) + 1])
        rig.receive(p, *chain, full=full, sent=choose.choice([None, payload]))

    for p in rig.fragments:
        train(rig)
        rig.receive(p, rig.published(p), sent=rig.contribute(p).payload)
    warm = xla.num_compilations()
    for k in range(100):
        exchange(k % 3)
    assert xla.num_compilations() == warm


def test_rows_of_equal_shape_share_their_graphs_wherever_they_lie():
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


def test_anchor_is_shown_and_local_values_return():
    rig = xla_rig(torch.bfloat16)
    train(rig)
    values = [rig.local(p) for p in rig.fragments]
    for _ in range(2):
        rig.device.show_anchor()
    assert [rig.device.encode(rig.device.snapshot(p)).norm for p in rig.fragments] == [0.0] * 3
    assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)
    for _ in range(2):
        rig.device.show_local()
    assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)
    train(rig)


def test_bad_updates_and_non_finite_parameters_are_refused():
    rig = xla_rig()
    good = rig.published(0)
    bad = [
        Update(None, [good[:-1]], None),
        Update(None, [good, torch.full_like(good, 0xFF)], None),
        Update(None, (), good[1:]),
        Update(rig.device.anchor(0).index_fill(0, torch.tensor([3]), torch.nan), (), None),
    ]
    before = rig.device.digest(0)
    for update in bad:
        with pytest.raises(CorruptMessageError):
            rig.device.stage(0, update)
    assert rig.device.digest(0) == before
    with torch.no_grad():
        rig.params["bias"].add_(torch.nan)
    xla.sync()
    p = next(p for p in rig.fragments if any(s.name == "bias" for s in rig.plan.fragments[p]))
    with pytest.raises(NonFiniteError, match="bias"):
        rig.contribute(p)


@pytest.mark.parametrize("anchor_device", PLACES)
def test_second_thread_exchanges_while_the_first_trains(anchor_device):
    """300 exchanges: what is staged late or refused lands later, and nothing is lost or recompiled."""
    rig, mirror, choose = xla_rig(anchor_device=anchor_device), Rig(), random.Random(1)
    jobs, landings = queue.SimpleQueue(), queue.SimpleQueue()

    def link():
        while (job := jobs.get()) is not None:
            p, snapshot, update, fails = job
            payload = rig.device.encode(snapshot).payload
            if fails:
                try:
                    rig.device.stage(p, Update(None, [update[:-1]], None))
                except CorruptMessageError:
                    payload = None
            landings.put((p, update, rig.device.stage(p, Update(None, [update], payload))))

    thread = threading.Thread(target=link)
    thread.start()
    in_flight, warm = set(), 0
    for k in range(300):
        train(rig)
        p = k % 3
        while p in in_flight or (choose.random() < 0.4 and not landings.empty()):
            landed, update, staged = landings.get()
            rig.device.land(landed, staged)
            in_flight.discard(landed)
            mirror.receive(landed, update)
        published = encode(torch.zeros(rig.numel(p)).uniform_(-0.1, 0.1), wire="int8", block_size=16, name="update")
        jobs.put((p, rig.device.snapshot(p), published, choose.random() < 0.2))
        in_flight.add(p)
        if k == 10:
            warm = xla.num_compilations()
    jobs.put(None)
    thread.join(timeout=60)
    assert xla.num_compilations() == warm
    while in_flight:
        landed, update, staged = landings.get()
        rig.device.land(landed, staged)
        in_flight.discard(landed)
        mirror.receive(landed, update)
    assert [rig.device.digest(p) for p in rig.fragments] == [mirror.device.digest(p) for p in rig.fragments]


def fetched_bytes(work):
    """How many bytes come from the device meanwhile."""
    before = (metrics.metric_data("InboundData") or (0, 0.0, []))[1]
    work()
    return metrics.metric_data("InboundData")[1] - before


def test_one_byte_for_each_element_comes_from_the_device():
    rig = xla_rig()
    train(rig)
    for p in rig.fragments:
        elements, norms = rig.numel(p), 2 * 4
        assert fetched_bytes(lambda p=p: rig.contribute(p)) == elements + 2 * elements // BLOCK + norms
        assert fetched_bytes(lambda p=p: rig.local(p)) == 4 * elements


def memory(dim=None, **learner):
    """What the run says of a model of 4 MiB in 4 fragments."""
    weight = torch.nn.Parameter(torch.zeros(1024, 1024).to("xla"))
    if dim is not None:
        xla.shard(weight, dim)
    plan = FragmentPlan.balanced({"weight": (1024, 1024)}, num_fragments=4, max_slice_numel=1 << 20)
    return XlaFragments(plan, {"weight": weight}, RunConfig(num_fragments=4), LearnerConfig(**learner)).memory()


def test_memory_of_each_placement_is_stated():
    anchors = "anchors take 4.0 MiB of each of 1 device(s) as 'device', 4.0 MiB of host memory as 'host'"
    assert memory() == (
        f"anchor_device='device': {anchors}; residuals take 0.0 MiB of each device, an exchange up to 3.0 MiB"
    )
    assert memory(anchor_device="host", align="overwrite") == (
        f"anchor_device='host': {anchors}; residuals take 4.0 MiB of each device, an exchange up to 3.0 MiB"
    )
