"""Averaged weights that callbacks put into the module stay there after training, and are never exchanged."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn

from tests.strategy.conftest import TinyModel

EPOCHS = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 2, "limit_val_batches": 1}


class WithBatchNorm(TinyModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def loss(self, batch):
        return super().loss(batch) + self.norm(self.embedding(batch["input_ids"]).flatten(0, 1)).square().mean()


class Keep(Callback):
    """Records the parameters at the end of the last batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.strategy.membership:  # it still trains
            self.local = trainer.strategy._local_parameters()


def drained(scenario):
    """Return the parameters of the last contributions, by name."""
    link, found = scenario.link, {}
    for p, values in enumerate(link.drained):
        for entry in link.plan.layout(p, link.config.block_size).entries:
            found.setdefault(entry.slice.name, []).append((entry.slice, entry.of(values)))
    return {name: torch.cat([v for _, v in sorted(each, key=lambda e: e[0])]) for name, each in found.items()}


def check(scenario, keep):
    assert drained(scenario).keys() == keep.local.keys()
    for name, values in drained(scenario).items():
        assert torch.equal(values, keep.local[name].flatten()), name


@pytest.mark.parametrize("kind", [WeightAveraging, EMAWeightAveraging])
def test_average_stays_in_the_module_and_is_not_sent(scenario, model, trainer_for, kind):
    average, keep = kind(), Keep()
    trainer_for(callbacks=[average, keep], **EPOCHS).fit(model)
    check(scenario, keep)
    averaged = average._average_model.module
    assert torch.equal(model.body.weight, averaged.body.weight)
    assert not torch.equal(model.body.weight, keep.local["body.weight"])
    assert scenario.link.events[-2:] == ["finish", "close"]


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("kind", [TinyModel, WithBatchNorm])
def test_stochastic_average_stays_in_the_module_and_is_not_sent(scenario, trainer_for, kind):
    average, keep, module = StochasticWeightAveraging(0.05, swa_epoch_start=1), Keep(), kind()
    trainer_for(callbacks=[average, keep], **EPOCHS).fit(module)
    check(scenario, keep)
    assert torch.equal(module.body.weight, average._average_model.body.weight)
    assert not torch.equal(module.body.weight, keep.local["body.weight"])
    assert len(scenario.link.steps) == 6


class OfOnesOwn(Callback):
    """An EMA callback as users write it."""

    def on_fit_start(self, trainer, pl_module):
        self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, p in pl_module.named_parameters():
            self.average[name].lerp_(p.detach(), 0.5)

    def on_validation_start(self, trainer, pl_module):
        self.stored = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        self.put(pl_module, self.average)

    def on_validation_end(self, trainer, pl_module):
        self.put(pl_module, self.stored)

    def on_train_end(self, trainer, pl_module):
        self.put(pl_module, self.average)

    def put(self, pl_module, values):
        for name, p in pl_module.named_parameters():
            p.data.copy_(values[name])


def test_a_users_average_is_validated_and_training_continues_without_it(scenario, model, trainer_for):
    class Unchanged(Keep):
        num_seen = 0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if hasattr(self, "local"):
                self.num_seen += 1
                assert torch.equal(pl_module.body.weight, self.local["body.weight"])

    average, keep = OfOnesOwn(), Unchanged()
    trainer_for(callbacks=[average, keep], num_sanity_val_steps=0, **EPOCHS).fit(model)
    assert keep.num_seen == 5
    check(scenario, keep)
    assert torch.equal(model.validated[-1], average.average["body.weight"])
    assert torch.equal(model.body.weight, average.average["body.weight"])


class AtModelEval(TinyModel):
    """Sets weights in Lightning's hooks for the mode, as for schedule-free optimizers."""

    def on_train_batch_start(self, batch, batch_idx):
        assert not hasattr(self, "local") or torch.equal(self.body.weight, self.local)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.local = self.body.weight.detach().clone()

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.found = [*getattr(self, "found", []), self.body.weight.detach().clone()]
        self.body.weight.data.add_(5)

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.body.weight.data.copy_(self.found[-1])


def test_weights_set_at_a_change_of_the_mode_are_validated_and_not_sent(scenario, trainer_for):
    keep, module = Keep(), AtModelEval()
    start = module.body.weight.detach().clone()
    trainer_for(callbacks=[keep], num_sanity_val_steps=0, **EPOCHS).fit(module)
    check(scenario, keep)
    assert all(map(torch.equal, module.found, [start, start, start + 1]))  # the anchor, and at the end the drained one
    assert all(map(torch.equal, module.validated, [each + 5 for each in module.found]))
    assert torch.equal(module.body.weight, start + 1)
    assert not vars(module.trainer.fit_loop.epoch_loop.val_loop).keys() & {"_on_evaluation_model_eval"}


def test_callbacks_of_the_trainer_are_restored(scenario, model, trainer_for):
    keep = Keep()
    trainer = trainer_for(callbacks=[keep], max_steps=1)
    before = list(trainer.callbacks)
    trainer.fit(model)
    assert trainer.callbacks == before
