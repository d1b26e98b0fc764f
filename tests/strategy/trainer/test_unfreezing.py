"""Parameters that are unfrozen during a fit are exchanged from its start; otherwise an error names them."""

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.trainer.parameters import trainable_parameters
from tests.strategy.conftest import TinyModel
from tests.strategy.models import WithBackbone

HEAD = {"embedding.weight", "body.weight", "body.bias"}
FROZEN = {"frozen.weight", "frozen.bias"}
EPOCHS = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 2, "limit_val_batches": 0}


class Unfreezes(Callback):
    """Unfreezes a layer manually, without a finetuning callback."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            getattr(pl_module, self.name).requires_grad_(True)


def test_with_a_finetuning_callback_all_parameters_are_exchanged(scenario, trainer_for):
    module = WithBackbone()
    before = module.backbone.weight.detach().clone()
    locals_ = []

    class Keep(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            locals_.append(pl_module.backbone.weight.detach().clone())

    callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1), Keep()]
    trainer_for(callbacks=callbacks, **EPOCHS).fit(module)
    assert scenario.link.model.shapes.keys() == HEAD | FROZEN | {"backbone.weight", "backbone.bias"}
    assert scenario.link.model.frozen_digest.keys() & scenario.link.model.shapes.keys() == set()
    assert torch.equal(locals_[0], before)
    assert not torch.equal(locals_[1], before)
    assert torch.equal(module.backbone.weight, before + 1)  # the anchor, as for all parameters


def test_a_completely_frozen_model_can_be_unfrozen_by_a_callback(scenario, trainer_for, model):
    class Late(BackboneFinetuning):
        def on_fit_start(self, trainer, pl_module): ...

        def freeze_before_training(self, pl_module):
            pl_module.requires_grad_(False)

        def finetune_function(self, pl_module, epoch, optimizer):
            pl_module.requires_grad_(True)

    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    trainer_for(callbacks=Late(), **EPOCHS).fit(model)
    assert len(scenario.link.steps) == 6


def test_parameters_of_an_optimizer_are_exchanged_and_may_be_unfrozen_manually(scenario, model, trainer_for, caplog):
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    trainer_for(callbacks=Unfreezes("frozen"), **EPOCHS).fit(model)
    assert scenario.link.model.shapes.keys() == HEAD | FROZEN
    assert "2 frozen parameters (20 values) are exchanged, because an optimizer holds them" in caplog.text


@pytest.mark.parametrize(("is_frozen", "is_automatic"), [(False, True), (True, True), (False, False)])
def test_an_average_with_requires_grad_is_exchanged_and_named(scenario, trainer_for, caplog, is_frozen, is_automatic):
    class WithAverage(TinyModel):
        def __init__(self):
            super().__init__()
            self.average = AveragedModel(self.body).requires_grad_(not is_frozen)
            self.automatic_optimization = is_automatic

        def configure_optimizers(self):
            return torch.optim.SGD([*self.embedding.parameters(), *self.body.parameters()], lr=0.1)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.average.update_parameters(self.body)

    trainer_for(max_steps=2, max_epochs=1, limit_val_batches=0).fit(WithAverage())
    average = {"average.module.weight", "average.module.bias"}
    assert scenario.link.model.shapes.keys() == HEAD | (set() if is_frozen else average)
    said = "average.module.weight, average.module.bias: exchanged, although no optimizer holds them"
    assert caplog.text.count(said) == (is_automatic and not is_frozen)


def test_unfreezing_a_parameter_that_is_not_exchanged_stops_training_and_names_it(scenario, model, trainer_for):
    with pytest.raises(ConfigError, match=r"frozen.weight, frozen.bias: unfrozen during the fit, but not exchanged"):
        trainer_for(callbacks=Unfreezes("frozen"), **EPOCHS).fit(model)
    assert len(scenario.link.steps) == 2


def test_the_base_of_an_adapter_is_not_exchanged(scenario, trainer_for):
    peft = pytest.importorskip("peft")

    class Adapted(TinyModel):
        def __init__(self):
            super().__init__()
            config = peft.LoraConfig(r=2, target_modules=["0"])
            self.body = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), config)
            self.body.requires_grad_(True)
            for name, param in self.named_parameters():
                param.requires_grad_("lora_" in name)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer_for(max_steps=2, limit_val_batches=0).fit(Adapted())
    assert len(scenario.link.model.shapes) == 2
    assert all("lora_" in name for name in scenario.link.model.shapes)


def test_frozen_parameters_can_be_named_for_the_exchange(model):
    assert trainable_parameters(model, ["frozen.weight", "elsewhere"]).keys() == HEAD | {"frozen.weight"}


@pytest.mark.parametrize("replaces", [True, False])
def test_a_layer_replaced_during_the_fit_is_an_error_and_a_new_optimizer_is_not(scenario, trainer_for, model, replaces):
    class NewOptimizer(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.body = nn.Linear(4, 4) if replaces else pl_module.body
                trainer.strategy.optimizers = [pl_module.configure_optimizers()]

    trainer = trainer_for(callbacks=NewOptimizer(), **EPOCHS)
    if not replaces:
        trainer.fit(model)
        assert trainer.global_step == 6
        return
    with pytest.raises(ConfigError, match=r"2 parameters \(body.weight, body.bias\).*are not exchanged"):
        trainer.fit(model)


@pytest.mark.parametrize(("how", "names"), [("add", "added.weight, added.bias"), ("replace", "body.weight")])
def test_parameters_that_an_optimizer_gets_during_the_fit_are_an_error(scenario, trainer_for, model, how, names):
    class Change(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            group = trainer.optimizers[0].param_groups[0]
            if trainer.current_epoch == 1 and how == "add":
                pl_module.added = nn.Linear(4, 4)
                trainer.optimizers[0].add_param_group({"params": list(pl_module.added.parameters())})
            elif trainer.current_epoch == 1:
                old, pl_module.body.weight = pl_module.body.weight, nn.Parameter(torch.ones(4, 4))
                group["params"] = [pl_module.body.weight if p is old else p for p in group["params"]]

    with pytest.raises(ConfigError, match=rf"parameters \({names}\): an optimizer trains them.*are not exchanged"):
        trainer_for(callbacks=Change(), **EPOCHS).fit(model)
    assert len(scenario.link.steps) == 2


def test_a_tensor_outside_of_modules_that_an_optimizer_held_from_the_start_is_no_error(scenario, trainer_for, model):
    temperature = torch.zeros((), requires_grad=True)
    model.configure_optimizers = lambda: torch.optim.SGD([model.body.weight, temperature], lr=0.1)

    class Change(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.strategy.optimizers = [pl_module.configure_optimizers()]
                trainer.optimizers[0].add_param_group({"params": [pl_module.body.bias]})

    trainer_for(callbacks=Change(), **EPOCHS).fit(model)
    assert len(scenario.link.steps) == 6


@pytest.mark.parametrize("freezes", [True, False])
def test_a_layer_that_is_frozen_during_the_fit_is_named_once(scenario, trainer_for, model, caplog, freezes):
    class Freeze(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.body.requires_grad_(not (freezes and trainer.current_epoch == 1))

    trainer_for(callbacks=Freeze(), **EPOCHS).fit(model)
    said = [text for text in caplog.messages if "frozen during the fit" in text]
    assert [text.partition(":")[0] for text in said] == ["body.weight, body.bias"] * freezes


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_network_that_is_frozen_for_the_step_of_another_optimizer_is_not_named(
    scenario, trainer_for, model, caplog, is_raw
):
    class Adversarial(type(model)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.body, self.embedding)]

        def training_step(self, batch, batch_idx):
            both = (self.body, self.embedding)
            for optimizer, mine, other in zip(self.optimizers(not is_raw), both, both[::-1], strict=True):
                mine.requires_grad_(True)
                other.requires_grad_(False)
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    trainer_for(max_steps=-1, max_epochs=1, limit_val_batches=0).fit(Adversarial())
    assert len(scenario.link.steps) == 6
    assert "frozen during the fit" not in caplog.text
