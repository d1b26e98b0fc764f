"""A device with random parameters, for tests of fragments on every kind of device."""

from __future__ import annotations

import random

import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import decode, encode
from lightning_diloco.devices import device_for
from lightning_diloco.devices.base import Encoded, Update
from lightning_diloco.devices.dense import DenseFragments

BLOCK = 16
SHAPES = {"embedding": (37, 5), "matrix": (24, 7), "conv": (4, 3, 2, 2), "bias": (11,), "scalar": ()}


class Rig:
    """A device with random parameters, and the updates that a syncer would publish."""

    shapes, max_slice_numel = SHAPES, 64

    def __init__(self, dtype=torch.float32, where="cpu", num_fragments=3, wire="int8", **learner):
        self.generator, self.wire = torch.Generator().manual_seed(1), wire
        self.params = {
            name: torch.nn.Parameter(self.random(shape).to(dtype).to(where)) for name, shape in self.shapes.items()
        }
        if "conv" in self.params:
            self.params["conv"].data = self.params["conv"].data.contiguous(memory_format=torch.channels_last)
        self.lay_out()
        self.plan = FragmentPlan.balanced(
            self.shapes, num_fragments=num_fragments, max_slice_numel=self.max_slice_numel
        )
        config = RunConfig(block_size=BLOCK, num_fragments=num_fragments, wire=wire)
        self.device: DenseFragments = device_for(torch.device(where))(
            self.plan, self.params, config, LearnerConfig(**learner)
        )
        for p in self.fragments:
            self.device.adopt(p, self.device.local_values(p))

    def lay_out(self):
        """Parameters lie where they are."""

    @property
    def fragments(self):
        return range(self.plan.num_fragments)

    def random(self, shape, scale=1.0):
        return torch.randn(shape, generator=self.generator) * scale

    def settle(self):
        self.device.settle()

    def train(self, scale=0.01):
        self.settle()
        with torch.no_grad():
            for param in self.params.values():
                param.add_(self.random(param.shape, scale).to(param))

    def numel(self, p):
        return self.plan.layout(p, BLOCK).padded_numel

    def decoded(self, p, payload):
        return decode(payload, numel=self.numel(p), wire=self.wire, block_size=BLOCK)

    def published(self, p, scale=0.1):
        """Return a random encoded update; its padding is zero."""
        update = torch.zeros(self.numel(p))
        for entry in self.plan.layout(p, BLOCK).entries:
            entry.of(update).copy_(self.random(entry.numel, scale))
        return encode(update, wire=self.wire, block_size=BLOCK, name="update")

    def contribute(self, p) -> Encoded:
        return self.device.encode(self.device.snapshot(p))

    def receive(self, p, *chain, full=None, sent=None):
        self.device.land(p, self.device.stage(p, Update(full=full, chain=chain, sent=sent)))

    def local(self, p, cast=torch.float64):
        return self.device.local_values(p).to(cast)

    def stored(self, p):
        """Return cast(anchor) in float64."""
        out = self.device.anchor(p)
        for entry in self.plan.layout(p, BLOCK).entries:
            part = entry.of(out)
            part.copy_(part.to(self.params[entry.slice.name].dtype))
        return out.double()

    def contributes_zero(self, num_rounds):
        """Check that a learner without a step contributes zero after any published updates."""
        for round_ in range(num_rounds):
            for p in self.fragments:
                encoded = self.contribute(p)
                assert not encoded.payload[: self.numel(p)].any()
                assert (encoded.norm, encoded.relative_error) == (0.0, 0.0)
                self.receive(p, self.published(p), sent=encoded.payload if round_ % 2 else None)
                assert torch.equal(self.local(p), self.stored(p))


def lands_alike(one, other):
    """Check that two rigs have equal anchors, and parameters equal up to rounding, after the same random sequence."""
    choose = random.Random(0)
    for _ in range(30):
        p, merged, is_full = choose.randrange(3), choose.random() < 0.5, choose.random() < 0.2
        updates = [one.published(p) for _ in range(choose.randint(1, 2))]
        full = one.device.anchor(p) + one.decoded(p, updates[0]) if is_full else None
        for _ in updates:
            other.published(p)  # keeps both generators in step
        for rig in (one, other):
            rig.train()
            sent = rig.contribute(p).payload if merged else None
            rig.receive(p, *(() if is_full else updates), full=full, sent=sent)
        assert torch.equal(one.device.anchor(p), other.device.anchor(p))
    for p in one.fragments:
        assert torch.allclose(one.local(p), other.local(p), rtol=1e-2, atol=1e-2)
