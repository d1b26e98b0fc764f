"""Options are validated together; the public strategy becomes its final class; the name is registered once."""

import sys

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.config import LearnerConfig
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.backends.single import SingleDeviceDiLoCo
from lightning_diloco.strategy.decoupled import final_class
from lightning_diloco.strategy.registration import register


def test_unset_options_are_not_passed_on(scenario, model, trainer_for):
    strategy = DecoupledDiLoCoStrategy(sync_every=12, wire="int4", align="blend", learner="mira")
    trainer_for(strategy=strategy, max_steps=1, limit_val_batches=0).fit(model)
    assert scenario.link.run_options == {"sync_every": 12, "wire": "int4"}
    assert scenario.link.learner == LearnerConfig(align="blend", learner="mira")


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        DecoupledDiLoCoStrategy(
            inner="ddp", sync_evry=3, overlap=0, align="drop", learner="a/b", token_count_fn=7, quite_unlike_any=1
        )
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 7
    assert "unknown option 'sync_evry': did you mean 'sync_every'?" in text
    assert "unknown option 'quite_unlike_any': known: align, " in text
    assert "inner='ddp': must be 'auto' or a strategy object" in text
    assert "'carry', 'overwrite', 'blend'" in text


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        DecoupledDiLoCoStrategy("auto", 24)


def test_trainer_binds_the_public_strategy_to_its_device(trainer_for):
    strategy = DecoupledDiLoCoStrategy()
    trainer = trainer_for(strategy=strategy)
    assert trainer.strategy is strategy
    assert type(strategy) is SingleDeviceDiLoCo
    assert isinstance(strategy, SingleDeviceStrategy)
    assert strategy.root_device == torch.device("cpu")
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 0, True)


def test_precision_and_accelerator_survive_binding(trainer_for):
    trainer = trainer_for(precision="bf16-true")
    assert trainer.strategy.precision_plugin.precision == "bf16-true"
    assert trainer.strategy.accelerator is trainer.accelerator


@pytest.mark.parametrize(("device", "num_nodes"), [("hpu", 1), ("hpu", 2)])
def test_unsupported_devices_are_refused(device, num_nodes):
    with pytest.raises(ConfigError, match=rf"{num_nodes} node\(s\) .* type {device}"):
        final_class([torch.device(device)], num_nodes)


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_accelerators_get_the_final_class_of_one_device(device):
    assert final_class([torch.device(device, 0)], 1) is SingleDeviceDiLoCo


def test_several_devices_of_apple_silicon_are_refused():
    with pytest.raises(ConfigError, match="2 device\\(s\\) each of type mps"):
        final_class([torch.device("mps", 0)] * 2, 1)
    with pytest.raises(ConfigError, match=r"of type mps.*pass Trainer\(accelerator=\"cpu\"\)"):
        DecoupledDiLoCoStrategy(DDPStrategy())._check_devices([torch.device("mps", 0)], 1)


def test_registering_twice_changes_nothing():
    before = StrategyRegistry["decoupled_diloco"]
    register()
    assert StrategyRegistry["decoupled_diloco"] is before


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_lightning_cli_leaves_options_unset(scenario, model, tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer: {accelerator: cpu, logger: false, enable_checkpointing: false, strategy: "
        "{class_path: lightning_diloco.DecoupledDiLoCoStrategy, init_args: {sync_every: 6}}}\n"
    )
    arguments = [f"--config={config}", "--trainer.strategy.init_args.overlap=1"]
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    cli = LightningCLI(type(model), run=False, save_config_callback=None, seed_everything_default=False)
    assert cli.trainer.strategy._run_options == {"sync_every": 6, "overlap": 1}
