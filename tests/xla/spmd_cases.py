"""Tests for one process that computes on four virtual devices; test_xla_spmd.py starts it."""

from __future__ import annotations

import queue
import random
import threading

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import encode
from lightning_diloco.devices import xla
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.xla_sharded import ShardedXlaFragments
from lightning_diloco.errors import ConfigError, CorruptMessageError
from lightning_diloco.strategy.xla import SpmdXLADiLoCo
from tests.devices.test_device_fragments import SHAPES, Rig
from tests.xla.stress import train_through_adversity
from tests.xla.test_xla_trainer import Line, loader, trainer_for

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore")]

NUM_DEVICES = 4
DIMS = {"embedding": 0, "matrix": 1, "conv": None, "bias": 0, "scalar": None}  # 37 rows and 11 elements: padded


@pytest.fixture(scope="module", autouse=True)
def _mesh():
    assert xla.use_mesh() == NUM_DEVICES


class ShardedRig(Rig):
    """The rig of the device tests, with parameters over all devices."""

    def __init__(self, dtype=torch.float32, **learner):
        self.generator = torch.Generator().manual_seed(1)
        self.params = {
            name: torch.nn.Parameter(self.random(shape).to(dtype).to("xla")) for name, shape in SHAPES.items()
        }
        for name, param in self.params.items():
            xla.shard(param, DIMS[name])
        xla.sync()
        self.plan = FragmentPlan.balanced(SHAPES, num_fragments=3, max_slice_numel=64)
        config = RunConfig(block_size=16, num_fragments=3)
        self.device = ShardedXlaFragments(self.plan, self.params, config, LearnerConfig(**learner))
        for p in self.fragments:
            self.device.adopt(p, self.device.local_values(p))


def train(rig):
    rig.train()
    xla.sync()


@pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_equal_cpu_over_a_random_sequence(dtype, align):
    cpu, sharded = Rig(dtype, align=align), ShardedRig(dtype, align=align)
    choose = random.Random(0)
    for _ in range(30):
        p, merged = choose.randrange(3), choose.random() < 0.5
        updates = [cpu.published(p) for _ in range(choose.randint(0, 3))]
        _ = [sharded.published(p) for _ in updates]
        sent = {}
        for rig in (cpu, sharded):
            train(rig)
            sent[rig] = rig.contribute(p)
            rig.receive(p, *updates, sent=sent[rig].payload if merged else None)
        assert torch.equal(sent[cpu].payload, sent[sharded].payload)
        assert cpu.device.digest(p) == sharded.device.digest(p)
    tolerance = 2 * torch.finfo(dtype).eps
    assert all(torch.allclose(cpu.local(p), sharded.local(p), rtol=tolerance, atol=tolerance) for p in cpu.fragments)
    assert {name: xla.sharded_dim(param) for name, param in sharded.params.items()} == DIMS


def test_anchor_is_shown_and_local_values_return():
    rig = ShardedRig(torch.bfloat16)
    train(rig)
    values = [rig.local(p) for p in rig.fragments]
    rig.device.show_anchor()
    assert [rig.device.encode(rig.device.snapshot(p)).norm for p in rig.fragments] == [0.0] * 3
    assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)
    rig.device.show_local()
    assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)


def test_second_thread_exchanges_shards_while_the_first_trains():
    """300 exchanges, some refused first; nothing is compiled after the first ones."""
    rig, mirror, choose = ShardedRig(), Rig(), random.Random(1)
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
        published = encode(torch.zeros(rig.numel(p)).uniform_(-0.1, 0.1), wire="int8", block_size=16, name="update")
        jobs.put((p, rig.device.snapshot(p), published, choose.random() < 0.2))
        in_flight.add(p)
        warm = xla.num_compilations() if k == 10 else warm
    while in_flight:
        land()
    jobs.put(None)
    thread.join(timeout=60)
    assert xla.num_compilations() == warm
    assert [rig.device.digest(p) for p in rig.fragments] == [mirror.device.digest(p) for p in rig.fragments]


class Noting(Line):
    """Notes every loss."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


def noted(root, accelerator, devices):
    """20 steps without a link."""
    torch.manual_seed(5)
    model = Noting()
    trainer_for(root, 20, accelerator=accelerator, devices=devices, fast_dev_run=20).fit(model, loader(), loader())
    return [float(loss) for loss in model.losses]


def test_losses_equal_those_of_one_device(tmp_path):
    assert noted(tmp_path, "xla", NUM_DEVICES) == pytest.approx(noted(tmp_path, "cpu", 1), rel=1e-5)


def test_fit_shards_parameters_and_optimizer_alike_and_learns(tmp_path):
    torch.manual_seed(5)
    model, seen = Line(), {}

    class Look(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Line, *_: object) -> None:
            state = trainer.optimizers[0].state
            for name, param in module.named_parameters():
                seen[name] = [xla.sharded_dim(t) for t in (param, state[param]["exp_avg"], state[param]["exp_avg_sq"])]

    trainer = trainer_for(tmp_path, 300, devices=NUM_DEVICES, callbacks=[Look()], val_check_interval=100)
    trainer.fit(model, loader(), loader())
    assert type(trainer.strategy) is SpmdXLADiLoCo
    assert seen == {
        "layers.0.weight": [0] * 3,
        "layers.0.bias": [0] * 3,
        "layers.2.weight": [1] * 3,
        "layers.2.bias": [0] * 3,
    }
    assert model.val_losses[-1] < 0.5 * model.val_losses[0]
    assert model.compilations[-1] == model.compilations[180]


def test_rule_that_does_not_divide_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(SpmdXLADiLoCo, "sharding_rules", ((r"2\.bias", 1),))
    trainer = trainer_for(tmp_path, 1, devices=NUM_DEVICES, fast_dev_run=1)
    with pytest.raises(ConfigError, match=r"layers\.2\.bias of shape \(4,\) is to be laid out along dimension 1"):
        trainer.fit(Line(), loader())


def test_300_exchanges_over_a_bad_link_leave_the_published_anchors(tmp_path):
    train_through_adversity(tmp_path, devices=NUM_DEVICES)
