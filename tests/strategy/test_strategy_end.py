"""The end of a fit: the run is left before Lightning validates and saves for the last time, without loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.strategy import fit as fits
from lightning_diloco.strategy.trainer.lightning_checkpoints import CHECKPOINT_KEY

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used")

LOW_ENOUGH = {"monitor": "val_loss", "stopping_threshold": 1e9}  # any loss is lower


class StopAfter(Callback):
    """Stops training like Timer."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 4


ENDS = {
    "within an epoch": {"max_steps": 4},
    "at max_epochs": {"max_steps": -1, "max_epochs": 2},
    "after a batch": {"max_steps": -1, "callbacks": [StopAfter()]},
    "early, at an epoch's end": {"max_steps": -1, "callbacks": [EarlyStopping(**LOW_ENOUGH)]},
    "early, by validation": {"max_steps": -1, "val_check_interval": 2, "callbacks": [EarlyStopping(**LOW_ENOUGH)]},
    "between epochs' ends": {"max_steps": 4, "val_check_interval": 2},
}
SAVES = {
    "by its loss": {
        "monitor": "val_loss",
        "mode": "max",
        "save_last": True,
    },  # highest for the final anchor
    "every epoch": {"save_last": True},
    "every two steps": {"every_n_train_steps": 2, "save_last": True},
    "weights": {"every_n_train_steps": 2, "save_last": True, "save_weights_only": True},
    "a link": {"save_last": "link"},
}


def weight_in(path: str | Path) -> torch.Tensor:
    return torch.load(path, weights_only=True)["state_dict"]["body.weight"]


@pytest.fixture
def fit(scenario, model, trainer_for, tmp_path):
    """Fits alone with checkpoints; returns the Trainer and the checkpoint callbacks."""
    scenario.is_last = True

    def run(save="every epoch", *, callbacks=(), ckpt_path=None, **options):
        keep = ModelCheckpoint(tmp_path / "kept", **SAVES[save])
        trainer = trainer_for(
            enable_checkpointing=True, num_sanity_val_steps=0, callbacks=[*callbacks, keep], **options
        )
        trainer.fit(model, ckpt_path=ckpt_path)
        return trainer, keep

    return run


@pytest.mark.seconds
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("end", ENDS)
def test_last_and_best_checkpoint_are_the_module_after_fit(model, fit, end, save):
    if save == "by its loss" and end in ("within an epoch", "after a batch"):
        pytest.skip("Lightning validates nothing and saves nothing")
    _, keep = fit(save, **ENDS[end])
    assert torch.equal(weight_in(keep.last_model_path), model.body.weight)
    has_metric = save == "by its loss" and end.startswith("early")  # the anchor before the last contributions
    best = model.validated[-1] if has_metric else model.body.weight
    assert torch.equal(weight_in(keep.best_model_path), best)
    assert torch.equal(best, model.body.weight) != has_metric


@pytest.mark.parametrize("end", ENDS)
def test_training_continues_from_the_last_checkpoint(model, fit, trainer_for, end):
    trainer, keep = fit("every two steps", **ENDS[end])
    batches = trainer.fit_loop.epoch_loop._batches_that_stepped
    resumed = trainer_for(max_steps=trainer.global_step + 2, max_epochs=-1)
    resumed.fit(model, ckpt_path=keep.last_model_path)
    assert resumed.fit_loop.epoch_loop._batches_that_stepped == batches + 2


@pytest.mark.parametrize("end", ENDS)
def test_lightning_validates_as_often_as_with_its_own_strategy(model, fit, end):
    fit(**ENDS[end])
    with_ours, model.validated = len(model.validated), []
    fit(strategy="auto", **ENDS[end])
    assert with_ours == len(model.validated)


@pytest.mark.parametrize("end", ENDS)
def test_changes_of_a_callback_to_the_module_stay(scenario, model, fit, end):
    class Average(Callback):
        def on_train_end(self, trainer, pl_module):
            assert scenario.link.events[-1] == "close"
            torch.nn.init.constant_(pl_module.body.weight, 0.5)

    options = dict(ENDS[end])
    fit(callbacks=[*options.pop("callbacks", ()), Average()], **options)
    assert (model.body.weight == 0.5).all()


@pytest.mark.parametrize("end", ENDS)
def test_without_a_syncer_at_the_end_the_module_keeps_its_trained_parameters(scenario, model, fit, caplog, end):
    scenario.lands = False
    start, trained = model.body.weight.detach().clone(), []

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trained.append(pl_module.body.weight.detach().clone())

    options = dict(ENDS[end])
    trainer, keep = fit("every two steps", callbacks=[*options.pop("callbacks", ()), Keep()], **options)
    assert not torch.equal(trained[-1], start)
    assert torch.equal(model.body.weight, trained[-1])
    assert torch.equal(weight_in(keep.last_model_path), trained[-1])
    (warning,) = [record.getMessage() for record in caplog.records if "was left at step" in record.getMessage()]
    assert f"at step {trainer.global_step} before all of this learner's work was merged" in warning
    assert "begins a new run with them" in warning


@pytest.mark.parametrize("lands", [True, False], ids=["merged", "unmerged"])
@pytest.mark.parametrize("join", [None, "diloco://127.0.0.1:1/run#token," + "0" * 64], ids=["own run", "run of others"])
def test_the_process_fails_at_its_end_if_a_joined_run_has_lost_work(scenario, fit, monkeypatch, join, lands):
    reasons = []
    monkeypatch.setattr(fits, "fail_at_exit", reasons.append)
    scenario.lands = scenario.is_last = lands
    fit(strategy=DecoupledDiLoCoStrategy(join=join))
    (reason,) = reasons or [None]
    assert (reason is None) == (lands or join is None)
    assert reason is None or "at step 4 before all of this learner's work was merged" in reason


def test_a_checkpoint_of_an_outage_restores_its_parameters(scenario, model, fit, trainer_for, tmp_path):
    """For other uses it holds the stale anchor; a new run begins with the trained parameters."""
    scenario.lands = False

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "away.ckpt")

    fit(callbacks=[Save()])
    checkpoint = torch.load(tmp_path / "away.ckpt", weights_only=True)
    local = checkpoint[CHECKPOINT_KEY]["local"]["body.weight"]
    assert not torch.equal(local, checkpoint["state_dict"]["body.weight"])

    class Compare(Callback):
        def on_train_start(self, trainer, pl_module):
            assert torch.equal(pl_module.body.weight, local)

    trainer_for(callbacks=Compare()).fit(model, ckpt_path=tmp_path / "away.ckpt")


def test_a_warning_says_that_steps_after_the_last_one_are_trained_alone(scenario, model, fit):
    class ChangesItsMind(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.global_step == 2

        def on_validation_end(self, trainer, pl_module):
            trainer.should_stop = False

    with pytest.warns(UserWarning, match="From here on this learner trains alone"):
        fit(callbacks=[ChangesItsMind()], val_check_interval=2, max_steps=4)
    assert len(scenario.link.steps) == 2
