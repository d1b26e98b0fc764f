"""A Trainer with this strategy can be copied and sent to other processes, and holds no object of a finished run."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from tests.strategy.conftest import Sequences

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Consider setting `persistent_workers=True`",
)

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


class Data(L.LightningDataModule):
    """A datamodule whose loaders hold one of its methods, and so the Trainer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return torch.utils.data.default_collate(samples)

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(Sequences(), batch_size=4, shuffle=True, collate_fn=self.collate, **self.options)


@pytest.mark.parametrize("how", COPIES)
def test_trainer_and_modules_can_be_copied_during_training(scenario, model, trainer_for, how):
    copied: list[str] = []
    callback = Copy(COPIES[how], copied)
    trainer_for(enable_progress_bar=True, limit_val_batches=0, callbacks=callback).fit(model, datamodule=Data())
    assert copied == ["strategy", "bar", "data", "loops", "trainer"]
    assert scenario.link.events[-1] == "close"


class Copy(Callback):
    """Copies at step 2. The copy belongs to no run, and the original continues."""

    def __init__(self, how: Callable[[Any], Any], copied: list[str]) -> None:
        self.how, self.copied = how, copied

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        things = {"strategy": trainer.strategy, "bar": trainer.progress_bar_callback, "data": trainer.datamodule}
        for name, thing in {**things, "loops": trainer.fit_loop, "trainer": trainer}.items():
            self.how(thing)
            self.copied.append(name)
        assert self.how(trainer.strategy).membership is None
        assert trainer.strategy.membership is not None


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_spawned_workers_load_the_data(scenario, model, trainer_for, start):
    trainer = trainer_for(max_steps=8, limit_val_batches=0)  # more than an epoch
    trainer.fit(model, datamodule=Data(num_workers=1, multiprocessing_context=start))
    assert len(scenario.link.steps) == 8


@pytest.mark.parametrize("fails", [False, True])
def test_a_trainer_holds_no_object_of_a_finished_run(scenario, model, trainer_for, fails):
    class Fail(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if fails:
                raise RuntimeError("broken")

    trainer = trainer_for(enable_progress_bar=True, callbacks=Fail())
    try:
        trainer.fit(model)
    except RuntimeError:
        assert fails
    anchors = weakref.ref(scenario.link.device)
    scenario.made.clear()
    gc.collect()
    assert anchors() is None
    assert "on_advance_end" not in vars(trainer.fit_loop.epoch_loop)
