"""Schedules by steps of a learner that joins a run late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, OneCycleLR, SequentialLR, StepLR

from tests.strategy.conftest import Scenario, TinyModel

Fit = Callable[..., list[float]]


def count(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, float)


class Scheduled(TinyModel):
    """Records the rate of each step, as a multiple of the optimizer's own rate."""

    def __init__(self, schedule: Callable[[Any], Any] = count, **config: Any) -> None:
        super().__init__()
        self.schedule, self.config = schedule, {"interval": "step", **config}
        self.rates: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"] / self.learning_rate)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), **self.config}}


@pytest.fixture
def late(scenario: Scenario, trainer_for: Callable[..., L.Trainer]) -> Fit:
    """Fits a learner that joins at step 8 of the run; returns the rates of its steps."""
    scenario.is_late, scenario.run_steps = True, 8

    def fit(schedule: Callable[[Any], Any] = count, *, trainer: dict[str, Any] | None = None, **config: Any) -> Any:
        model = Scheduled(schedule, **config)
        trainer_for(**{"max_steps": 20, "limit_val_batches": 0, **(trainer or {})}).fit(model)
        return model.rates

    return fit


def test_a_late_learner_begins_at_the_runs_position_and_holds_at_the_end(late: Fit, caplog: Any) -> None:
    assert late() == pytest.approx([*range(8, 20), *[20] * 8])
    assert "schedules by steps begin at step 8, where the run is" in caplog.text


def test_the_first_learners_schedule_begins_at_its_start(scenario: Scenario, late: Fit) -> None:
    scenario.is_late = False
    assert late() == pytest.approx(range(20))


def test_a_run_beyond_max_steps_has_the_last_rate(scenario: Scenario, late: Fit) -> None:
    scenario.run_steps = 800
    assert late() == pytest.approx([20] * 20)


@pytest.mark.parametrize(
    ("frequency", "batches", "expected"),
    [(2, 1, [4, 4, 5, 5, 6, 6]), (1, 2, [8, 8, 9, 9, 10, 10]), (4, 2, [4, 4, 4, 4, 5, 5])],
)
def test_less_frequent_updates_are_counted_correctly(
    late: Fit, frequency: int, batches: int, expected: list[int]
) -> None:
    rates = late(frequency=frequency, trainer={"accumulate_grad_batches": batches})
    assert rates[:6] == pytest.approx(expected)


def test_a_schedule_that_cannot_pass_its_end_is_held_there(late: Fit) -> None:
    rates = late(lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=20, cycle_momentum=False))
    assert len(rates) == 20
    assert rates[12:] == [rates[12]] * 8


def test_nested_schedules_are_advanced(late: Fit) -> None:
    def chain(optimizer: Any) -> SequentialLR:
        return SequentialLR(optimizer, [count(optimizer), StepLR(optimizer, 2, gamma=0.5)], milestones=[6])

    alone = Scheduled(chain).configure_optimizers()
    for _ in range(8):
        alone["optimizer"].step()
        alone["lr_scheduler"]["scheduler"].step()
    assert late(chain)[0] == pytest.approx(alone["optimizer"].param_groups[0]["lr"] / 0.1)


def test_chained_schedules_are_held_at_the_end(late: Fit) -> None:
    assert late(lambda optimizer: ChainedScheduler([count(optimizer)])) == pytest.approx([*range(8, 20), *[20] * 8])


def test_a_schedule_of_another_library_trains(trainer_for: Callable[..., L.Trainer], scenario: Scenario) -> None:
    class OfTimm:
        """The interface of timm's schedulers."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, epoch: int) -> None:
            self.optimizer.param_groups[0]["lr"] = 1 / (1 + epoch)

        def state_dict(self) -> dict[str, Any]:
            return {}

        load_state_dict = state_dict

    class Model(Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.global_step)

    model = Model(OfTimm)
    trainer_for(max_steps=3, limit_val_batches=0).fit(model)
    assert model.rates[1:] == pytest.approx([5, 10 / 3])


@pytest.mark.parametrize(
    ("config", "trainer", "sentence"),
    [
        ({"interval": "epoch"}, {}, "schedules by epochs begin at their start"),
        ({}, {"max_steps": -1, "max_epochs": 2}, "because Trainer has no max_steps"),
    ],
)
def test_a_schedule_without_a_known_end_in_steps_begins_at_its_start(
    late: Fit, caplog: Any, config: dict[str, Any], trainer: dict[str, Any], sentence: str
) -> None:
    assert late(trainer=trainer, **config)[0] == 0
    assert sentence in caplog.text
    assert "where the run is" not in caplog.text
