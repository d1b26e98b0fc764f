"""Optimizers that keep copies of parameters do not undo landings, and are restored relative to the run's values."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_diloco.devices.base import Update
from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.trainer.optimizer_copies import ParameterCopies
from tests.strategy.optimizers import Lookahead, Masters, ScheduleFree

MOVE = 0.5


class Lands(Callback):
    """Moves each anchor and its parameters by MOVE after the second step."""

    def __init__(self, scenario):
        self.scenario = scenario

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            device = self.scenario.link.device
            for p in range(self.scenario.link.plan.num_fragments):
                device.land(p, device.stage(p, Update(full=device.anchor(p) + MOVE, chain=(), sent=None)))


@pytest.mark.parametrize("kind", [ScheduleFree, Lookahead, Masters, torch.optim.ASGD])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_landing_is_not_undone_by_later_steps(scenario, model, trainer_for, kind, precision):
    class Still(type(model)):
        def configure_optimizers(self):
            return kind([p for p in self.parameters() if p.requires_grad], lr=1e-12)

    module = Still()
    start = module.body.weight.detach().clone()
    found = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            found.append(pl_module.body.weight.detach().float().clone())

    callbacks = [Lands(scenario), Keep()]
    trainer_for(max_steps=6, limit_val_batches=0, precision=precision, callbacks=callbacks).fit(module)
    tolerance = {"atol": 1e-2 if precision == "bf16-true" else 1e-5, "rtol": 0}
    assert torch.allclose(found[0], start, **tolerance)
    for weight in found[1:]:
        assert torch.allclose(weight, start + MOVE, **tolerance)


def test_copies_move_to_the_shown_anchor_and_return_exactly(scenario, model, trainer_for):
    seen = {}

    class Watched(type(model)):
        def configure_optimizers(self):
            return ScheduleFree([p for p in self.parameters() if p.requires_grad], lr=0.1)

        @property
        def pair(self):
            (optimizer,) = self.trainer.optimizers
            return self.body.weight.detach().clone(), optimizer.state[self.body.weight]["z"].clone()

        def validation_step(self, batch, batch_idx):
            seen["shown"] = self.pair

        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                seen["after"] = self.pair
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            seen.setdefault("before", None)
            if self.trainer.global_step == 2:
                seen["before"] = self.pair

    trainer_for(max_steps=3, val_check_interval=2, num_sanity_val_steps=0).fit(Watched())
    for before, after in zip(seen["before"], seen["after"], strict=True):
        assert torch.equal(before, after)
    (local, z), (anchor, shown) = seen["before"], seen["shown"]
    assert not torch.equal(local, anchor)
    assert torch.allclose(shown - anchor, z - local, atol=1e-6)


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))


OF_TORCH = {
    "Adam": {}, "AdamW": {}, "SGD": {"momentum": 0.9}, "RMSprop": {}, "Adagrad": {}, "Adadelta": {}, "NAdam": {},
    "RAdam": {}, "Adamax": {}, "Rprop": {}, "LBFGS": {}, "Adafactor": {},
}  # fmt: skip


def steps(module, optimizer, number):
    def closure():
        optimizer.zero_grad()
        x = torch.randn(16, 6)
        loss = (module(x) - x[:, :3]).square().mean()
        loss.backward()
        return loss

    for _ in range(number):
        optimizer.step(closure)


@pytest.mark.parametrize("name", OF_TORCH)
def test_moments_are_not_copies(name):
    module = net()
    optimizer = getattr(torch.optim, name)(module.parameters(), **OF_TORCH[name])
    copies = ParameterCopies(dict(module.named_parameters()))
    for _ in range(5):
        steps(module, optimizer, 1)
        copies.look([optimizer])
        assert [copies.of(each) for each, _ in module.named_parameters()] == [[]] * 6


@pytest.mark.parametrize(("kind", "key"), [(ScheduleFree, "z"), (Lookahead, "slow"), (Masters, "master")])
def test_copies_are_found_after_one_step_and_stored_relative_to_their_parameters(kind, key):
    module = net()
    optimizer = kind(module.parameters(), lr=0.01)
    copies = ParameterCopies(dict(module.named_parameters()))
    copies.look([optimizer])
    steps(module, optimizer, 1)
    copies.look([optimizer])
    for name, p in module.named_parameters():
        (found,) = copies.of(name)
        assert found.data_ptr() == optimizer.state[p][key].data_ptr()

    state = copies.relative(optimizer, optimizer.state_dict())
    before = {name: (p.detach().clone(), optimizer.state[p][key].clone()) for name, p in module.named_parameters()}
    other = net()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    again = kind(other.parameters(), lr=0.01)
    again.load_state_dict(state)
    copies.restore(again, state)
    for name, p in other.named_parameters():
        was, copy = before[name]
        assert torch.allclose(again.state[p][key] - p, copy - was, atol=1e-6)


def test_the_parameter_itself_is_not_a_copy():
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    copies = ParameterCopies(dict(module.named_parameters()))
    for p in module.parameters():
        optimizer.state[p]["itself"] = p.detach()
    copies.look([optimizer])
    assert [copies.of(name) for name, _ in module.named_parameters()] == [[]] * 6


def test_copies_are_refused_if_the_device_cannot_move_them():
    module = net()
    optimizer = ScheduleFree(module.parameters())
    copies = ParameterCopies(dict(module.named_parameters()))
    copies.attach(object())
    steps(module, optimizer, 1)
    with pytest.raises(ConfigError, match=r"ScheduleFree keeps copies of parameters in its state \('z'\)"):
        copies.look([optimizer])
