"""Optimizer steps that bypass Lightning are inner steps like all others."""

import pytest
import torch
from torch.optim import optimizer as optimizer_module

BATCH_TOKENS = 4 * 6


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def by_hand(kind, optimizers):
    """A module that steps by hand, with what `optimizers(module)` returns."""

    class ByHand(kind):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for optimizer in optimizers(self):
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers(self):
                optimizer.step()
            return loss

    return ByHand()


def without_lightning(module):
    return [module.optimizers(use_pl_optimizer=False)]


def of_its_own(module):
    if not hasattr(module, "own"):
        module.own = torch.optim.SGD(trained(module), lr=0.1)
    return [module.own]


@pytest.mark.parametrize("optimizers", [without_lightning, of_its_own])
def test_steps_by_hand_count_and_settle_first(scenario, model, trainer_for, optimizers):
    module = by_hand(type(model), optimizers)
    trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(module)
    assert scenario.link.steps == [(BATCH_TOKENS, "tokens")] * 3
    assert scenario.link.unchanged == [True, True]


def test_step_of_an_overridden_optimizer_step_counts_once(scenario, model, trainer_for):
    class Raw(type(model)):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.optimizer.step(closure=optimizer_closure)

    trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(Raw())
    assert scenario.link.steps == [(BATCH_TOKENS, "tokens")] * 3
    assert scenario.link.unchanged == [True, True]


class Wrapping(torch.optim.Optimizer):
    """Steps another optimizer within its own step, as Lookahead does."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_step_within_a_step_is_a_part_of_it(scenario, model, trainer_for, is_raw):
    class Candidate(type(model)):
        def configure_optimizers(self):
            return Wrapping(trained(self))

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            (optimizer.optimizer if is_raw else optimizer).step(closure=optimizer_closure)

    trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(Candidate())
    assert scenario.link.steps == [(BATCH_TOKENS, "tokens")] * 3


def test_optimizers_of_other_parameters_do_not_count(scenario, model, trainer_for):
    def another(module):
        noise = torch.nn.Parameter(torch.zeros(2))
        noise.grad = torch.ones(2)
        return [torch.optim.SGD([noise], lr=0.1)]

    module = by_hand(type(model), another)
    trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=2, limit_val_batches=0).fit(module)
    assert scenario.link.steps == []


def test_no_step_is_seen_after_the_fit(scenario, model, trainer_for):
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)
    optimizer = model.configure_optimizers()
    optimizer.step()
    assert len(scenario.link.steps) == 1
    assert not optimizer_module._global_optimizer_pre_hooks
