"""Optimizer steps that bypass Lightning count as inner steps."""

import pytest
import torch
from torch.optim import optimizer as optimizer_module

from tests.strategy.conftest import TinyModel

BATCH_TOKENS = 4 * 6


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def by_hand(kind, optimizers):
    """Return a module that steps manually, with the result of `optimizers(module)`."""

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
def test_manual_steps_count_and_settle_first(scenario, model, trainer_for, optimizers):
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
    """Steps another optimizer within its own step, like Lookahead."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_nested_step_does_not_count_twice(scenario, model, trainer_for, is_raw):
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


class Updated(TinyModel):
    """Updates its parameters in every second batch, without an optimizer of torch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.body.weight += batch_idx % 2

    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_updates_without_an_optimizer_are_inner_steps(scenario, trainer_for, caplog):
    module = Updated()
    before = module.body.weight.detach().clone()
    trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=4, limit_val_batches=0).fit(module)
    assert scenario.link.steps == [(BATCH_TOKENS, "tokens")] * 4
    assert torch.equal(module.body.weight, before + 1)  # the anchor, which has increased by 1
    assert "no inner step was counted" not in caplog.text


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_batches_between_steps_of_an_unknown_optimizer_are_not_inner_steps(scenario, trainer_for):
    class Accumulates(Updated):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            if batch_idx % 2 == 0:
                of_its_own(self)[0].step()

    trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=5, limit_val_batches=0).fit(Accumulates())
    assert len(scenario.link.steps) == 3


def test_a_fit_without_an_inner_step_keeps_the_trained_parameters_and_warns(scenario, trainer_for, caplog, tmp_path):
    class Holds(Updated):
        def configure_optimizers(self):
            return TinyModel.configure_optimizers(self)

        def on_train_epoch_end(self):
            self.trainer.save_checkpoint(tmp_path / "last.ckpt")

    module = Holds()
    trained = module.body.weight.detach() + 2 + 1  # at the end the anchor and the module move by 1
    trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=4, limit_val_batches=0).fit(module)
    assert scenario.link.steps == []
    torch.testing.assert_close(module.body.weight.detach(), trained)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["body.weight"], module.body.weight)
    (warning,) = [text for text in caplog.messages if "no inner step was counted" in text]
    assert warning.startswith("4 batches were trained")
    assert "call step() of the optimizers that configure_optimizers returns" in warning


def test_steps_after_the_fit_are_ignored(scenario, model, trainer_for):
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)
    optimizer = model.configure_optimizers()
    optimizer.step()
    assert len(scenario.link.steps) == 1
    assert not optimizer_module._global_optimizer_pre_hooks
