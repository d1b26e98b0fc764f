"""A Trainer over four virtual devices in one process; test_xla_spmd.py starts it."""

from __future__ import annotations

from itertools import pairwise

import lightning as L
import pytest
import torch
from lightning.fabric.accelerators import XLAAccelerator
from lightning.pytorch import accelerators
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_diloco.devices.xla import ops as xla
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.xla import SpmdXLADiLoCo
from lightning_diloco.strategy.trainer.paths import OwnPathsFirst
from tests.xla.stress import train_through_adversity
from tests.xla.test_xla_trainer import Line, loader, trainer_for

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore")]

NUM_DEVICES = 4


@pytest.fixture(scope="module", autouse=True)
def _mesh():
    assert xla.use_mesh() == NUM_DEVICES


class Look(Callback):
    """Records the sharded dimensions of parameters, moments and samples."""

    def __init__(self) -> None:
        self.dims: dict[str, list[int | None]] = {}
        self.sample_dims: set[int | None] = set()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Line, outputs: object, batch: list[torch.Tensor], *_: object
    ) -> None:
        self.sample_dims |= {xla.sharded_dim(tensor) for tensor in batch}
        state = trainer.optimizers[0].state
        for name, param in module.named_parameters():
            tensors = (param, state[param]["exp_avg"], state[param]["exp_avg_sq"])
            self.dims[name] = [xla.sharded_dim(tensor) for tensor in tensors]


def test_fit_shards_parameters_and_optimizer_alike_learns_and_resumes(tmp_path):
    """Lightning and the learner write checkpoints during training; none of them needs a new graph."""
    torch.manual_seed(5)
    model, look = Line(), Look()
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=90, save_top_k=-1, filename="{step}")
    options = {"devices": NUM_DEVICES, "enable_checkpointing": True}
    trainer = trainer_for(tmp_path, 300, callbacks=[look, saving], val_check_interval=100, **options)
    trainer.fit(model, loader(), loader())
    assert type(trainer.strategy) is SpmdXLADiLoCo
    assert look.dims == {
        "layers.0.weight": [1] * 3,
        "layers.0.bias": [0] * 3,
        "layers.2.weight": [1] * 3,
        "layers.2.bias": [0] * 3,
    }
    assert look.sample_dims == {0}
    assert model.val_losses[-1] < 0.5 * model.val_losses[0]
    assert model.compilations[-1] == model.compilations[181]

    again, look = Line(), Look()
    trainer = trainer_for(tmp_path / "again", 275, callbacks=[look], limit_val_batches=0, **options)
    trainer.fit(again, loader(), ckpt_path=tmp_path / "saved" / "step=270.ckpt")
    assert len(again.compilations) == 5
    assert all(len(set(dims)) == 1 for dims in look.dims.values())


def test_layers_of_a_decoder_are_sharded_by_rules_and_sizes(tmp_path):
    strategy = trainer_for(tmp_path, 1, devices=NUM_DEVICES).strategy
    expected = {
        ("model.embed_tokens.weight", (1001, 64)): 1,  # the rule: a token's row is on all devices
        ("lm_head.weight", (1001, 64)): 1,
        ("transformer.wte.weight", (4096, 64)): 1,
        (
            "model.layers.0.self_attn.q_proj.weight",
            (96, 64),
        ): 1,  # rows are cut into slices
        ("model.layers.0.mlp.up_proj.weight", (256, 66)): 0,
        ("model.layers.0.experts.weight", (8, 64, 128)): 2,  # the largest
        ("model.norm.weight", (64,)): 0,
        ("odd.weight", (5, 7)): None,
        ("scale", ()): None,
    }
    assert {(name, shape): strategy._dim(name, shape) for name, shape in expected} == expected


def test_rule_that_does_not_divide_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(SpmdXLADiLoCo, "sharding_rules", ((r"2\.bias", 1),))
    trainer = trainer_for(tmp_path, 1, devices=NUM_DEVICES, fast_dev_run=1)
    with pytest.raises(ConfigError, match=r"layers\.2\.bias of shape \(4,\) is to be laid out along dimension 1"):
        trainer.fit(Line(), loader())


def test_accumulation_does_not_grow_the_graph(tmp_path):
    model = Line()
    options = {"devices": NUM_DEVICES, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    trainer_for(tmp_path, 40, **options).fit(model, loader(4))
    assert len(model.syncs) == 80
    assert all(before < after for before, after in pairwise(model.syncs))
    assert model.compilations[-1] == model.compilations[60]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_300_exchanges_over_a_bad_link_agree_with_the_host(tmp_path, precision):
    train_through_adversity(tmp_path, NUM_DEVICES, precision)


def test_several_tpu_chips_of_a_host_are_one_learner_over_a_mesh(tmp_path, monkeypatch):
    """Only the number of chips is simulated: the strategy's name uses all chips in one process."""
    monkeypatch.setattr(accelerators.XLAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(XLAAccelerator, "auto_device_count", staticmethod(lambda: NUM_DEVICES))
    options = {"accelerator": "tpu", "devices": "auto", "fast_dev_run": 3}
    trainer = trainer_for(tmp_path, 3, strategy="decoupled_diloco", **options)
    assert type(trainer.strategy) is SpmdXLADiLoCo
    assert (trainer.world_size, len(trainer.strategy.parallel_devices)) == (1, NUM_DEVICES)
    assert type(trainer.strategy.launcher) is OwnPathsFirst  # no process is started
    model = Line()
    trainer.fit(model, loader(), loader())
    assert len(model.compilations) == 3
