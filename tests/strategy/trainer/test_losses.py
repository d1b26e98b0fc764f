"""The losses that are shown for a run: of every learner, and of the final anchor."""

from __future__ import annotations

import csv
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from lightning_diloco.protocol.metric_names import VAL_LOSSES
from lightning_diloco.strategy.trainer.losses import NOT_VALIDATED, train_loss


class Stop(Callback):
    """Ends training like Timer and EarlyStopping."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 2


ENDS = {
    "max_steps": {"max_steps": 3},
    "max_epochs": {"max_steps": -1, "max_epochs": 1},
    "should_stop": {"max_steps": -1, "callbacks": Stop()},
}


@pytest.fixture(autouse=True)
def _last(scenario):
    scenario.is_last = True


@pytest.fixture
def _joined(monkeypatch):
    """Make the learner join a run of others, which needs the loss of its final anchor."""
    monkeypatch.setenv("DILOCO_JOIN", "diloco://127.0.0.1:1/run#secret," + "0" * 64)


@pytest.mark.usefixtures("_joined")
@pytest.mark.parametrize("end", ENDS)
def test_last_learner_of_a_run_it_joined_reports_the_loss_of_the_drained_anchor(scenario, model, trainer_for, end):
    start = model.body.weight.detach().clone()
    trainer_for(**ENDS[end], num_sanity_val_steps=0).fit(model)
    assert len(model.validated) == 1  # from Lightning, if it validates
    assert torch.equal(model.validated[-1], start + 1)  # the stand-in's anchors grow by 1 at the end
    with torch.no_grad():
        wanted = model.loss(next(iter(model.val_dataloader()))).item()
    assert scenario.link.reports == [(pytest.approx(wanted), None)]
    assert scenario.link.events[-3:] == ["finish", "report", "close"]


@pytest.mark.usefixtures("_joined")
def test_a_learner_that_is_not_the_last_does_not_validate(scenario, model, trainer_for):
    scenario.is_last = False
    trainer_for(num_sanity_val_steps=0).fit(model)
    assert model.validated == []
    assert scenario.link.events[-2:] == ["finish", "close"]


def test_the_learner_that_began_the_run_adds_no_validation(scenario, model, trainer_for):
    trainer_for(num_sanity_val_steps=0).fit(model)  # four of an epoch's six batches
    trainer_for(num_sanity_val_steps=0, max_steps=6).fit(model)
    assert len(model.validated) == 1
    assert scenario.made[0].reports == [(None, NOT_VALIDATED)]
    assert scenario.made[1].reports == [(pytest.approx(scenario.made[1].reports[0][0]), None)]


@pytest.mark.usefixtures("_joined")
def test_without_a_loss_the_report_has_the_reason(scenario, model, trainer_for, monkeypatch):
    trainer_for(limit_val_batches=0).fit(model)
    steps = [lambda self, batch, batch_idx: self.log("accuracy", 1.0), lambda self, batch, batch_idx: 1 / 0]
    for number, step in enumerate(steps):
        monkeypatch.setenv("DILOCO_JOIN", f"diloco://127.0.0.1:1/run{number}#secret," + "0" * 64)
        monkeypatch.setattr(type(model), "validation_step", step)
        trainer_for(num_sanity_val_steps=0).fit(model)
    losses, reasons = zip(*(link.reports[0] for link in scenario.made), strict=True)
    assert losses == (None, None, None)
    assert reasons[0] == NOT_VALIDATED
    assert reasons[1] == "validation logs no loss: no name contains 'loss' (found: accuracy)"
    assert reasons[2] == "validation failed: ZeroDivisionError('division by zero')"


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_without_validation_data_the_report_has_the_reason(scenario, model, trainer_for, monkeypatch):
    monkeypatch.delattr(type(model), "val_dataloader")
    trainer_for().fit(model, DataLoader(model.train_dataloader().dataset, batch_size=4))
    ((loss, reason),) = scenario.link.reports
    assert loss is None
    assert "no validation data" in reason


def test_fit_that_trained_nothing_reports_nothing(scenario, model, trainer_for):
    trainer_for(limit_train_batches=0).fit(model)
    assert scenario.link.events == ["start", "finish", "close"]


@pytest.mark.parametrize("name", VAL_LOSSES)
def test_preferred_names_take_precedence_over_other_losses(scenario, model, trainer_for, monkeypatch, name):
    def validation_step(self, batch, batch_idx):
        self.log_dict({"aux_loss": 3.0, name: 2.0})

    monkeypatch.setattr(type(model), "validation_step", validation_step)
    trainer_for(num_sanity_val_steps=0, max_steps=6).fit(model)
    assert scenario.link.reports == [(2.0, None)]


@pytest.mark.usefixtures("_joined")
def test_loggers_and_callbacks_see_the_additional_validation(scenario, model, trainer_for, tmp_path):
    logger = CSVLogger(tmp_path)
    keep = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", mode="max", filename="best")
    callbacks = [keep, EarlyStopping("val_loss")]
    trainer = trainer_for(
        logger=logger, callbacks=callbacks, enable_checkpointing=True, val_check_interval=2, max_steps=5
    )
    trainer.fit(model)
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    logged = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(logged) == 3  # after two steps, after four, and the final anchor
    assert logged[-1] == pytest.approx(scenario.link.reports[0][0])
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(logged[-1])


@pytest.mark.seconds
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_final_validation_works_with_progress_bars(scenario, model, trainer_for, bar, capsys):
    progress = bar(refresh_rate=1)
    trainer_for(enable_progress_bar=True, callbacks=progress, val_check_interval=4).fit(model)
    assert scenario.link.reports[0][0] is not None


@pytest.mark.parametrize("manual", [False, True])
def test_loss_of_every_step_is_reported_on_the_cpu(scenario, model, trainer_for, manual):
    found = []

    class Told(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            found.append(trainer.callback_metrics["train_loss"].item())

    class Manual(type(model)):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    trainer_for(limit_val_batches=0, callbacks=Told()).fit(Manual() if manual else model)
    assert scenario.link.losses == pytest.approx(found)


def test_loss_is_not_divided_with_accumulated_gradients(scenario, model, trainer_for):
    one_sample = DataLoader(torch.utils.data.Subset(model.train_dataloader().dataset, [0] * 8), batch_size=2)
    for accumulated in (1, 4):
        trainer = trainer_for(max_steps=1, limit_val_batches=0, accumulate_grad_batches=accumulated)
        trainer.fit(deepcopy(model), one_sample)
    plain, whole = (link.losses[0] for link in scenario.made)
    assert whole == pytest.approx(plain)


def test_a_sharded_loss_is_gathered_by_all_ranks(monkeypatch):
    """If only some ranks read it, a sum over ranks would wait forever for the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.tensor(1.5), mesh, (Partial(),))
        asked = []
        monkeypatch.setattr(DTensor, "full_tensor", lambda self: asked.append(self) or torch.tensor(2.5))
        read = train_loss(SimpleNamespace(accumulate_grad_batches=2), part)
        assert len(asked) == 1, "by who calls it, not by who reads"
        assert read() == 5.0
        assert len(asked) == 1
    finally:
        dist.destroy_process_group()


def test_losses_that_are_not_finite_are_not_reported(scenario, model, trainer_for, monkeypatch):
    monkeypatch.setattr(type(model), "loss", lambda self, batch: self.body.weight.sum() * float("nan"))
    trainer_for(num_sanity_val_steps=0, max_steps=6).fit(model)
    assert scenario.link.losses == []
    assert scenario.link.reports == [(None, "the loss is nan")]
