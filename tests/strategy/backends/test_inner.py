"""Several devices have their own final class; `inner=` chooses it, and invalid values are refused at once."""

import json
import sys

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.ddp import DDPDiLoCo
from lightning_diloco.strategy.backends.fsdp import FSDPDiLoCo
from lightning_diloco.strategy.backends.model_parallel import ModelParallelDiLoCo
from lightning_diloco.strategy.inner import problems
from tests.strategy.conftest import TinyModel


def test_several_devices_are_one_learner_with_ddp_inside(trainer_for):
    trainer = trainer_for(devices=2, precision="bf16-mixed")
    assert type(trainer.strategy) is DDPDiLoCo
    assert isinstance(trainer.strategy, DDPStrategy)
    assert (trainer.world_size, trainer.global_rank) == (2, 0)
    assert isinstance(trainer.strategy.precision_plugin, MixedPrecision)
    assert isinstance(trainer.strategy.accelerator, CPUAccelerator)


def test_options_of_the_inner_object_are_used(trainer_for):
    strategy = DecoupledDiLoCoStrategy(DDPStrategy(find_unused_parameters=True, start_method="spawn"), sync_every=12)
    trainer = trainer_for(strategy=strategy, devices=2, num_nodes=3)
    assert trainer.strategy is strategy
    assert type(strategy) is DDPDiLoCo
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert strategy.launcher._start_method == "spawn"
    assert strategy._run_options == {"sync_every": 12}
    assert trainer.world_size == 6


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_inner_from_yaml_class_path(tmp_path, monkeypatch):
    inner = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"process_group_backend": "gloo"}}
    strategy = {"class_path": "lightning_diloco.DecoupledDiLoCoStrategy", "init_args": {"inner": inner}}
    trainer = {"strategy": strategy, "accelerator": "cpu", "devices": 2, "logger": False}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"trainer": trainer, "seed_everything": 1}))
    monkeypatch.setattr(sys, "argv", ["script", f"--config={config}"])
    cli = LightningCLI(TinyModel, run=False, save_config_callback=None)
    assert type(cli.trainer.strategy) is DDPDiLoCo
    assert cli.trainer.strategy.process_group_backend == "gloo"


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (DDPStrategy(accelerator=CPUAccelerator()), r"DDPStrategy\(accelerator=...\): must be left to the Trainer"),
        (DDPStrategy(parallel_devices=[torch.device("cpu")]), r"Trainer\(devices=...\)"),
        (DeepSpeedStrategy.__new__(DeepSpeedStrategy), "DeepSpeed's engine hides the parameters"),
        ("ddp", "must be 'auto' or a strategy object"),
        (None, "must be 'auto' or a strategy object"),
    ],
    ids=["accelerator", "devices", "deepspeed", "name", "none"],
)
def test_invalid_inner_strategies_are_refused(inner, said):
    with pytest.raises(ConfigError, match=said):
        DecoupledDiLoCoStrategy(inner)


def test_a_sharding_inner_strategy_has_its_own_class(trainer_for):
    trainer = trainer_for(
        strategy=DecoupledDiLoCoStrategy(ModelParallelStrategy(2, 1)), devices=2, precision="bf16-true"
    )
    assert type(trainer.strategy) is ModelParallelDiLoCo
    assert isinstance(trainer.strategy, ModelParallelStrategy)
    assert trainer.strategy._data_parallel_size == 2


@pytest.mark.parametrize(
    ("sizes", "devices", "num_nodes", "found"),
    [
        ((2, 2), 2, 1, r"data_parallel_size=2, tensor_parallel_size=2 with 2 device\(s\)"),
        ((2,), 2, 1, r"data_parallel_size=2, tensor_parallel_size=2 with 2 device\(s\)"),
        (("auto", 1), 2, 2, r"data_parallel_size=2, tensor_parallel_size=1 with 4 device\(s\)"),
    ],
    ids=["given", "tensor_auto", "data_auto"],
)
def test_mesh_that_does_not_fit_the_devices_is_refused(sizes, devices, num_nodes, found, trainer_for):
    strategy = DecoupledDiLoCoStrategy(ModelParallelStrategy(*sizes))
    with pytest.raises(ConfigError, match=f"{found}: their product must be"):
        trainer_for(strategy=strategy, devices=devices, num_nodes=num_nodes)


@pytest.mark.parametrize("sizes", [(), (1, 2), (2, 1)], ids=["auto", "tensor", "data"])
def test_mesh_that_fits_is_accepted(sizes, trainer_for):
    strategy = DecoupledDiLoCoStrategy(ModelParallelStrategy(*sizes))
    assert trainer_for(strategy=strategy, devices=2).strategy is strategy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "'NO_SHARD'.*FULL_SHARD or SHARD_GRAD_OP.*DDPStrategy"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)}, "'HYBRID_SHARD'"),
        ({"cpu_offload": True}, r"cpu_offload=True\): must be False"),
        ({"use_orig_params": False}, r"use_orig_params=False\): must be True"),
        ({"accelerator": CPUAccelerator()}, r"FSDPStrategy\(accelerator=...\): must be left to the Trainer"),
    ],
    ids=["whole", "hybrid", "offloaded", "flat", "accelerator"],
)
def test_invalid_options_of_fsdp_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        DecoupledDiLoCoStrategy(FSDPStrategy(**options))


def test_fsdp_has_its_own_class_which_needs_no_gpu(trainer_for):
    trainer = trainer_for(strategy=DecoupledDiLoCoStrategy(FSDPStrategy()), devices=2, precision="bf16-mixed")
    assert type(trainer.strategy) is FSDPDiLoCo
    assert isinstance(trainer.strategy, FSDPStrategy)
    assert isinstance(trainer.strategy.precision_plugin, FSDPPrecision)


SHARDING = [FSDPStrategy, ModelParallelStrategy]


@pytest.mark.parametrize("kind", [DDPStrategy, *SHARDING])
def test_inner_for_other_devices_is_refused(kind, trainer_for):
    with pytest.raises(ConfigError, match="nccl needs cuda"):
        trainer_for(strategy=DecoupledDiLoCoStrategy(kind(process_group_backend="nccl")), devices=2)


def test_fsdp_on_one_device_is_refused(trainer_for):
    with pytest.raises(ConfigError, match=r"inner=FSDPStrategy\(\) with 1 device: it shares a model among several"):
        trainer_for(strategy=DecoupledDiLoCoStrategy(FSDPStrategy()), devices=1)


@pytest.mark.parametrize("align", ["overwrite", "blend"])
@pytest.mark.parametrize("kind", SHARDING)
def test_alignment_that_needs_a_residual_is_refused_with_a_sharded_model(kind, align, trainer_for):
    with pytest.raises(ConfigError, match=rf"align='{align}' with inner={kind.__name__}\(\): must be 'carry'"):
        trainer_for(strategy=DecoupledDiLoCoStrategy(kind(), align=align), devices=2)
    assert trainer_for(strategy=DecoupledDiLoCoStrategy(DDPStrategy(), align=align), devices=2)


def test_externally_started_ranks_without_a_name_are_refused(trainer_for, model, monkeypatch):
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DILOCO_LEARNER", raising=False)
    trainer = trainer_for(strategy=DecoupledDiLoCoStrategy(join="diloco://127.0.0.1:1/r#token," + "0" * 64), devices=2)
    with pytest.raises(ConfigError, match=r"2 processes.*set DILOCO_LEARNER for all"):
        trainer.fit(model)


def test_a_valid_inner_strategy_has_no_problems():
    assert [problems(inner) for inner in ("auto", DDPStrategy(), *(kind() for kind in SHARDING))] == [[]] * 4
