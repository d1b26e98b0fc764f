"""Checkpoints hold the anchor, and the local parameters for a resume with the strategy."""

import threading

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_diloco.strategy.trainer.lightning_checkpoints import CHECKPOINT_KEY


@pytest.fixture
def callbacks():
    """Return further callbacks for the saving fit."""
    return []


@pytest.fixture
def saved(scenario, model, trainer_for, tmp_path, callbacks):
    """Save a checkpoint after two of three steps; return its path, and start and local value of body.weight."""
    found = {"path": tmp_path / "mid.ckpt", "start": model.body.weight.detach().clone()}

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                found["local"] = pl_module.body.weight.detach().clone()
                found["tied"] = pl_module.head.weight.detach().clone()
                trainer.save_checkpoint(found["path"])

    trainer_for(max_steps=3, limit_val_batches=0, callbacks=[*callbacks, Save()]).fit(model)
    return found


def test_checkpoint_holds_anchor_and_local_parameters(saved):
    checkpoint = torch.load(saved["path"], weights_only=True)
    state, own = checkpoint["state_dict"], checkpoint[CHECKPOINT_KEY]
    assert torch.equal(state["body.weight"], saved["start"])
    assert torch.equal(own["local"]["body.weight"], saved["local"])
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    assert own["local"].keys() == {"embedding.weight", "body.weight", "body.bias"}
    assert own["version"] == 1
    assert not torch.equal(saved["start"], saved["local"])


@pytest.mark.parametrize("callbacks", [[], [WeightAveraging()]], ids=["plain", "averaging"])
def test_resume_alone_seeds_with_local_parameters(scenario, saved, model, trainer_for, callbacks):
    seeds = []

    class Keep(Callback):
        def on_train_start(self, trainer, pl_module):
            seeds.append(pl_module.body.weight.detach().clone())
            assert torch.equal(pl_module.head.weight, saved["tied"])
            assert trainer.global_step == 2

    callbacks = [*callbacks, Keep()]
    trainer_for(max_steps=3, limit_val_batches=0, callbacks=callbacks).fit(type(model)(), ckpt_path=saved["path"])
    assert torch.equal(seeds[0], saved["local"])


def test_resume_into_a_run_adopts(scenario, saved, model, trainer_for):
    scenario.run_values = 0.5
    fresh = type(model)()
    fresh.learning_rate = 0.0
    trainer_for(max_steps=3, limit_val_batches=0).fit(fresh, ckpt_path=saved["path"])
    assert torch.equal(fresh.body.weight.detach(), torch.full((4, 4), 1.5))  # the link adds 1 at the end


@pytest.mark.parametrize("strategy", ["auto", "decoupled_diloco"])
def test_validate_loads_the_anchor_with_any_strategy(scenario, saved, model, trainer_for, strategy):
    fresh = type(model)()
    trainer_for(strategy=strategy).validate(fresh, ckpt_path=saved["path"], verbose=False)
    assert torch.equal(fresh.validated[0], saved["start"])


def test_plain_trainer_resumes_from_the_anchor(scenario, saved, model, trainer_for):
    fresh = type(model)()
    trainer = trainer_for(strategy="auto", max_steps=3, limit_val_batches=0)
    trainer.fit(fresh, ckpt_path=saved["path"])
    assert trainer.global_step == 3


def test_strategy_resumes_from_a_plain_checkpoint(scenario, model, trainer_for, tmp_path):
    plain = trainer_for(strategy="auto", max_steps=2, limit_val_batches=0)
    plain.fit(model)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    trained, fresh = model.body.weight.detach().clone(), type(model)()
    fresh.learning_rate = 0.0
    trainer = trainer_for(max_steps=3, limit_val_batches=0)
    trainer.fit(fresh, ckpt_path=tmp_path / "plain.ckpt")
    device = scenario.link.device
    anchors = torch.cat([device.anchor(p) for p in range(scenario.link.plan.num_fragments)])
    assert torch.isin(trained.flatten() + 1, anchors).all()


def test_model_checkpoint_in_validation_saves_both_values(scenario, model, trainer_for, tmp_path):
    start = model.body.weight.detach().clone()
    keep = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", filename="{step}", save_top_k=-1)
    trainer_for(max_steps=3, val_check_interval=2, enable_checkpointing=True, callbacks=keep).fit(model)
    checkpoint = torch.load(tmp_path / "ckpt" / "step=2.ckpt", weights_only=False)
    assert torch.equal(checkpoint["state_dict"]["body.weight"], start)
    assert not torch.equal(checkpoint[CHECKPOINT_KEY]["local"]["body.weight"], start)


def test_weights_only_checkpoint_has_no_local_parameters(scenario, model, trainer_for, tmp_path):
    keep = ModelCheckpoint(tmp_path / "ckpt", save_weights_only=True, every_n_train_steps=2, filename="weights")
    trainer_for(max_steps=2, limit_val_batches=0, enable_checkpointing=True, callbacks=keep).fit(model)
    assert CHECKPOINT_KEY not in torch.load(keep.best_model_path, weights_only=False)


def test_checkpoint_after_fit_is_the_drained_anchor(scenario, model, trainer_for, tmp_path):
    start = model.body.weight.detach().clone()
    trainer = trainer_for(limit_val_batches=0)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert torch.equal(checkpoint["state_dict"]["body.weight"], start + 1)
    assert CHECKPOINT_KEY not in checkpoint


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_checkpoint_of_the_last_step_is_saved_again_unless_it_was_deleted(
    scenario, model, trainer_for, tmp_path, is_deleted
):
    path = tmp_path / "uploaded.ckpt"

    class Upload(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(path)
            if is_deleted:
                path.unlink()

    trainer_for(max_steps=2, limit_val_batches=0, callbacks=Upload()).fit(model)
    assert path.exists() != is_deleted
    if not is_deleted:
        state = torch.load(path, weights_only=True)["state_dict"]
        assert torch.equal(state["body.weight"], model.body.weight)


@pytest.mark.filterwarnings("ignore:`AsyncCheckpointIO` is an experimental feature")
def test_a_checkpoint_that_is_still_being_written_is_saved_again(scenario, model, trainer_for, tmp_path):
    path, written = tmp_path / "async.ckpt", threading.Event()

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            assert written.wait(10.0)
            super().save_checkpoint(*args, **kwargs)

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(path)

        def on_train_end(self, trainer, pl_module):
            written.set()

    plugin = AsyncCheckpointIO(Slow())
    trainer_for(max_steps=1, limit_val_batches=0, callbacks=Save(), plugins=plugin).fit(model)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(state["body.weight"], model.body.weight)
