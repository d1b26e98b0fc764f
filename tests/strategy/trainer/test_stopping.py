"""Ending a whole run from one learner, and schedules by the tokens of the fleet."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.trainer.lr_schedules import FleetTokenLR, warmup_cosine
from tests.strategy.conftest import LENGTH, Scenario, TinyModel

BATCH, BATCHES = 4, 6  # samples of a batch, batches of an epoch
STEP_TOKENS = BATCH * LENGTH
LOW_ENOUGH = {"monitor": "val_loss", "stopping_threshold": 1e9}  # any loss is lower


def stops(scenario: Scenario) -> list[str]:
    return [event for event in scenario.link.events if event.startswith("stop the run")]


class Scheduled(TinyModel):
    """A module whose rate equals the fleet's tokens; it records the rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.rates.append(self.optimizers().param_groups[0]["lr"] / self.learning_rate)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = FleetTokenLR(optimizer, float, self.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_early_stopping_on_the_anchor_ends_the_run_before_the_drain(
    scenario: Scenario, model: TinyModel, trainer_for: Callable[..., L.Trainer]
) -> None:
    trainer = trainer_for(max_steps=20, val_check_interval=3, callbacks=EarlyStopping(**LOW_ENOUGH))
    trainer.fit(model)
    (said,) = stops(scenario)
    assert "Stopping threshold reached" in said
    assert len(scenario.link.steps) == 3
    assert scenario.link.events.index(said) < scenario.link.events.index("finish")


@pytest.mark.parametrize("monitor", ["val_loss", "train_loss"])
def test_early_stopping_at_the_end_of_an_epoch_ends_the_run_if_it_monitors_the_anchor(
    scenario: Scenario, model: TinyModel, trainer_for: Callable[..., L.Trainer], monitor: str
) -> None:
    trainer = trainer_for(max_steps=20, callbacks=EarlyStopping(**{**LOW_ENOUGH, "monitor": monitor}))
    trainer.fit(model)
    assert len(scenario.link.steps) == BATCHES  # end of the first epoch
    said = stops(scenario)
    assert len(said) == (monitor == "val_loss")
    assert all("Stopping threshold reached" in each for each in said)


NO_BETTER = {"monitor": "val_loss", "patience": 2, "min_delta": 1e9}  # only the first value is
NO_LESS = {"threshold": 1e9, "threshold_mode": "abs"}
VALIDATED = {"epochs": {}, "steps": {"val_check_interval": 2}, "both": {"val_check_interval": 3}}


@pytest.mark.parametrize("often", VALIDATED)
@pytest.mark.parametrize("lands", [True, False])
def test_an_unchanged_anchor_does_not_stop_the_run(
    scenario: Scenario, model: TinyModel, trainer_for: Callable[..., L.Trainer], lands: bool, often: str
) -> None:
    scenario.lands = lands
    stopping = EarlyStopping(**NO_BETTER, check_on_train_epoch_end=True if often == "both" else None)
    trainer_for(max_steps=36, callbacks=stopping, **VALIDATED[often]).fit(model)
    if lands:
        assert len(scenario.link.steps) == (6 if often == "steps" else 18)
        assert stops(scenario)
    else:
        assert len(scenario.link.steps) == 36
        assert stops(scenario) == []


@pytest.mark.parametrize("often", ["epochs", "steps"])
@pytest.mark.parametrize("lands", [True, False])
def test_an_unchanged_anchor_does_not_lower_the_rate(
    scenario: Scenario, trainer_for: Callable[..., L.Trainer], lands: bool, often: str
) -> None:
    class Plateau(TinyModel):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, **NO_LESS)
            when = {"interval": "epoch"} if often == "epochs" else {"interval": "step", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", **when}}

    scenario.lands = lands
    model = Plateau()
    trainer = trainer_for(max_steps=18, **VALIDATED[often])
    trainer.fit(model)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate < model.learning_rate if lands else rate == model.learning_rate


@pytest.mark.parametrize("when", ["local parameters", "training"])
def test_stopping_for_another_reason_ends_only_this_learner(
    scenario: Scenario, model: TinyModel, trainer_for: Callable[..., L.Trainer], when: str
) -> None:
    class AfterABatch(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    if when == "training":
        trainer = trainer_for(max_steps=20, callbacks=AfterABatch())
    else:
        strategy = DecoupledDiLoCoStrategy(evaluate="local")
        trainer = trainer_for(
            strategy=strategy, max_steps=20, val_check_interval=3, callbacks=EarlyStopping(**LOW_ENOUGH)
        )
    trainer.fit(model)
    assert len(scenario.link.steps) < 20
    assert stops(scenario) == []


@pytest.mark.parametrize("after", [0, 2])
def test_a_learner_stops_when_others_have_ended_the_run(
    scenario: Scenario, model: TinyModel, trainer_for: Callable[..., L.Trainer], after: int
) -> None:
    scenario.stopped_after = after
    trainer_for(max_steps=20).fit(model)
    assert len(scenario.link.steps) == after
    assert scenario.link.events[-2:] == ["finish", "close"]
    assert stops(scenario) == []


def test_a_token_budget_ends_the_run(
    scenario: Scenario, model: TinyModel, trainer_for: Callable[..., L.Trainer]
) -> None:
    scenario.others_tokens = 1000
    limit = 1000 + 3 * STEP_TOKENS
    trainer_for(strategy=DecoupledDiLoCoStrategy(max_fleet_tokens=limit), max_steps=20).fit(model)
    assert len(scenario.link.steps) == 3
    assert stops(scenario) == [f"stop the run: max_fleet_tokens={limit} reached"]


def test_an_invalid_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_fleet_tokens=0: must be an integer of at least 1"):
        DecoupledDiLoCoStrategy(max_fleet_tokens=0)


def test_a_schedule_by_fleet_tokens_starts_at_the_runs_position(
    scenario: Scenario, trainer_for: Callable[..., L.Trainer]
) -> None:
    scenario.others_tokens = 1000
    model = Scheduled()
    trainer_for(max_steps=3).fit(model)
    assert model.rates == pytest.approx([1000 + k * STEP_TOKENS for k in range(3)])


def test_a_schedule_by_fleet_tokens_is_saved_and_restored(
    scenario: Scenario, trainer_for: Callable[..., L.Trainer], tmp_path: Any
) -> None:
    trainer = trainer_for(max_steps=3)
    trainer.fit(Scheduled())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    scenario.made.clear()
    scenario.others_tokens = 500
    model = Scheduled()
    trainer_for(max_steps=5).fit(model, ckpt_path=tmp_path / "last.ckpt")
    assert model.rates == pytest.approx([500, 500 + STEP_TOKENS])


def test_a_schedule_by_fleet_tokens_needs_a_fleet(trainer_for: Callable[..., L.Trainer]) -> None:
    with pytest.raises(ConfigError, match="which has no fleet"):
        trainer_for(strategy="auto").fit(Scheduled())


def test_warm_up_and_cosine_by_tokens() -> None:
    factor = warmup_cosine(warmup=100, total=1100, final=0.1)
    assert [factor(0), factor(50), factor(100)] == [0, 0.5, 1]
    assert factor(350) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert factor(1100) == factor(5000) == pytest.approx(0.1)
