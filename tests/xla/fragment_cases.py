"""Tests of fragments on one XLA device and on a mesh: contributions, landings and anchors must be those of the CPU.

`OnXla` turns a rig of the device tests into an XLA rig; a file of tests derives from `FragmentCases` and sets the rigs.
"""

from __future__ import annotations

import queue
import random
import threading
from typing import ClassVar

import pytest
import torch
from torch_xla.debug import metrics

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import encode
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.xla import ops as xla
from lightning_diloco.devices.xla.fragments import XlaFragments
from lightning_diloco.errors import CorruptMessageError, NonFiniteError
from tests.devices.rig import BLOCK, Rig

DTYPES = [torch.float32, torch.bfloat16]
PLACES = ["device", "host"]


class OnXla(Rig):
    """A rig on XLA; every step ends with a sync."""

    def __init__(self, dtype=torch.float32, **options):
        super().__init__(dtype, "xla", **options)
        xla.sync()

    def train(self, scale=0.01):
        super().train(scale)
        xla.sync()


def fetched_bytes(work):
    """Count the bytes that are copied from the device in the block."""
    return _moved("InboundData", work)


def sent_bytes(work):
    """Count the bytes that are copied to the device in the block."""
    return _moved("OutboundData", work)


def _moved(name, work):
    before = (metrics.metric_data(name) or (0, 0.0, []))[1]
    work()
    return (metrics.metric_data(name) or (0, 0.0, []))[1] - before


def memory(dim=None, **learner):
    """Return the logged memory for a model of 4 MiB in 4 fragments."""
    weight = torch.nn.Parameter(torch.zeros(1024, 1024).to("xla"))
    if dim is not None:
        xla.shard(weight, dim)
    plan = FragmentPlan.balanced({"weight": (1024, 1024)}, num_fragments=4, max_slice_numel=1 << 20)
    return XlaFragments(plan, {"weight": weight}, RunConfig(num_fragments=4), LearnerConfig(**learner)).memory()


class FragmentCases:
    """The tests; `on_cpu` and `on_xla` are rigs with the same shapes."""

    on_cpu: ClassVar[type[Rig]]
    on_xla: ClassVar[type[OnXla]]

    def is_equal_to_cpu_over_a_random_sequence(self, dtype, **options):
        cpu, device = self.on_cpu(dtype, align=options["align"]), self.on_xla(dtype, **options)
        choose, epsilon = random.Random(0), 2 * torch.finfo(dtype).eps
        for _ in range(30):
            p, merged = choose.randrange(3), choose.random() < 0.5
            updates = [cpu.published(p) for _ in range(choose.randint(0, 3))]
            _ = [device.published(p) for _ in updates]  # keeps both generators in the same state
            sent = {}
            for rig in (cpu, device):
                rig.train()
                sent[rig] = rig.contribute(p)
            payloads, split = [sent[rig].payload for rig in (cpu, device)], cpu.numel(p)
            q_cpu, q_xla = (payload[:split].view(torch.int8).int() for payload in payloads)
            assert int((q_cpu - q_xla).abs().max()) <= 1
            assert torch.equal(*(payload[split:] for payload in payloads))  # scales
            assert sent[device].norm == pytest.approx(sent[cpu].norm, rel=1e-5)
            assert sent[device].relative_error == pytest.approx(sent[cpu].relative_error, rel=1e-3)
            for rig in (cpu, device):
                rig.receive(p, *updates, sent=sent[rig].payload if merged else None)
            assert digest(cpu.device.anchor(p)) == digest(device.device.anchor(p))
        for p in cpu.fragments:
            assert torch.allclose(cpu.local(p), device.local(p), rtol=epsilon, atol=epsilon)
        return device

    @pytest.mark.parametrize("wire", ["int4", "bf16", "fp32"])
    def test_every_precision_of_the_wire_lands_as_on_cpu(self, wire):
        cpu, device = self.on_cpu(wire=wire), self.on_xla(wire=wire)
        for p in cpu.fragments:
            update = cpu.published(p)
            device.published(p)
            for rig in (cpu, device):
                rig.train()
                payload = rig.contribute(p).payload
                assert rig.decoded(p, payload).any()
                rig.receive(p, update, sent=payload)
            assert digest(cpu.device.anchor(p)) == digest(device.device.anchor(p))
            assert torch.allclose(cpu.local(p), device.local(p), atol=1e-6)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_landing_removes_exactly_the_sent_values(self, dtype):
        rig = self.on_xla(dtype)
        rig.train()
        for p in rig.fragments:
            before, payload = rig.local(p), rig.contribute(p).payload
            rig.receive(p, sent=payload)
            expected = (before.float() - rig.stored(p).float()) + (rig.stored(p).float() + rig.decoded(p, payload))
            assert torch.equal(rig.local(p, torch.float32), expected.to(dtype).float())

    @pytest.mark.parametrize("anchor_device", PLACES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_learner_without_a_step_contributes_exactly_zero(self, dtype, anchor_device):
        self.on_xla(dtype, anchor_device=anchor_device).contributes_zero(num_rounds=3)

    def test_anchor_is_shown_and_local_values_return(self):
        rig = self.on_xla(torch.bfloat16)
        rig.train()
        values = [rig.local(p) for p in rig.fragments]
        for _ in range(2):
            rig.device.show_anchor()
        assert [rig.device.encode(rig.device.snapshot(p)).norm for p in rig.fragments] == [0.0] * 3
        assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)
        for _ in range(2):
            rig.device.show_local()
        assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)
        rig.train()

    @pytest.mark.parametrize("name", ["bias", "embedding"])
    def test_non_finite_parameters_are_named(self, name):
        rig = self.on_xla()
        with torch.no_grad():
            rig.params[name].add_(torch.nan)
        xla.sync()
        p = next(p for p in rig.fragments if any(s.name == name for s in rig.plan.fragments[p]))
        with pytest.raises(NonFiniteError, match=name):
            rig.contribute(p)

    def test_one_byte_per_element_is_copied_from_the_devices(self):
        rig = self.on_xla()
        rig.train()
        for p in rig.fragments:
            layout = rig.device._layouts[p]
            elements = layout.num_devices * layout.row_numel
            expected = elements + 2 * elements // layout.unit + 2 * 4 * layout.num_devices  # scales, norms
            assert fetched_bytes(lambda p=p: rig.contribute(p)) == expected
            assert fetched_bytes(lambda p=p: rig.local(p)) == 4 * elements

    def test_a_landing_uploads_the_anchor_that_a_snapshot_needs(self):
        """With "host" anchors, the anchor of the next fragment was prefetched, and the landing has made it outdated."""
        rig = self.on_xla(anchor_device="host")
        rig.train()
        rig.contribute(0)
        rig.receive(1, rig.published(1))
        rig.train()
        assert sent_bytes(lambda: rig.device.snapshot(1)) == 0
        assert sent_bytes(lambda: rig.device.snapshot(2)) > 0  # it was not due

    @pytest.mark.parametrize("anchor_device", PLACES)
    def test_a_collected_snapshot_is_encoded_without_the_device(self, anchor_device):
        rig = self.on_xla(anchor_device=anchor_device)
        rig.train()
        snapshot = rig.device.snapshot(0)
        assert fetched_bytes(lambda: rig.device.collect(snapshot)) > 0
        assert fetched_bytes(lambda: rig.device.encode(snapshot)) == 0
        assert not snapshot.found  # only the encoded result keeps it
        assert torch.equal(rig.device.encode(snapshot).payload, rig.device.encode(rig.device.snapshot(0)).payload)

    @pytest.mark.parametrize("anchor_device", PLACES)
    def test_no_graph_is_compiled_after_every_fragment_was_exchanged_once(self, anchor_device):
        rig, choose = self.on_xla(torch.float16, anchor_device=anchor_device), random.Random(0)  # first compiled here

        def exchange(p):
            rig.train()
            payload = rig.contribute(p).payload
            chain = [rig.published(p) for _ in range(choose.randint(0, 3))]
            full = choose.choice([None, rig.device.anchor(p) + 1])
            rig.receive(p, *chain, full=full, sent=choose.choice([None, payload]))

        rig.train()
        cold = xla.num_compilations()
        for p in rig.fragments:
            rig.train()
            rig.receive(p, rig.published(p), sent=rig.contribute(p).payload)
        warm = xla.num_compilations()
        per_signature = 3 if anchor_device == "device" else 2  # snapshot, landing; anchor's update
        assert warm - cold <= per_signature * len(rig.plan.signatures())
        for k in range(100):
            exchange(k % 3)
        assert xla.num_compilations() == warm

    @pytest.mark.parametrize("anchor_device", PLACES)
    def test_second_thread_exchanges_while_the_first_trains(self, anchor_device):
        """In 300 exchanges, late or refused updates land later, and nothing is lost or recompiled."""
        rig, mirror, choose = self.on_xla(anchor_device=anchor_device), self.on_cpu(), random.Random(1)
        jobs, landings = queue.SimpleQueue(), queue.SimpleQueue()

        def link():
            while (job := jobs.get()) is not None:
                p, snapshot, update, fails = job
                payload = rig.device.encode(snapshot).payload
                if fails:
                    with pytest.raises(CorruptMessageError):
                        rig.device.stage(p, Update(None, [update[:-1]], None))
                    payload = None
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
            rig.train()
            p = k % 3
            while p in in_flight or (choose.random() < 0.4 and not landings.empty()):
                land()
            values = torch.zeros(rig.numel(p)).uniform_(-0.1, 0.1)
            published = encode(values, wire="int8", block_size=BLOCK, name="update")
            jobs.put((p, rig.device.snapshot(p), published, choose.random() < 0.2))
            in_flight.add(p)
            warm = xla.num_compilations() if k == 10 else warm
        while in_flight:
            land()
        jobs.put(None)
        thread.join(timeout=60)
        assert xla.num_compilations() == warm
        assert all(torch.equal(rig.device.anchor(p), mirror.device.anchor(p)) for p in rig.fragments)
