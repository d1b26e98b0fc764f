"""State of a module that is not exchanged (BatchNorm, teachers, queues, codebooks) is not compared, and is restored."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_diloco.manifest import ModelDescription
from lightning_diloco.strategy.recovery.own_state import OwnState, copies_of_trained, follow
from tests.strategy.conftest import TinyModel
from tests.strategy.models import OWN_STATE, WithBatchNorm, WithTeacher

STEPS = {"max_steps": 3, "limit_val_batches": 0}


def trained(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def frozen(module):
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


class Takes(Callback):
    """Records the own state at the end of the last batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.strategy.membership:
            self.state = {name: value.clone() for name, value in trainer.strategy._present.own_state.take().items()}


@pytest.mark.parametrize("kind", OWN_STATE)
def test_state_that_training_changed_is_stored_and_restored(scenario, trainer_for, kind):
    torch.manual_seed(5)
    module = kind()
    trainer = trainer_for(**STEPS, callbacks=[taken := Takes()])
    trainer.fit(module)
    assert taken.state.keys() == OWN_STATE[kind]
    torch.manual_seed(6)
    other = kind()
    own = OwnState(other, frozen(other))
    assert own.objection(taken.state) is None
    own.give(taken.state)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in taken.state.items())
    assert torch.equal(other.state_dict()["frozen.weight"], other.frozen.weight)


def test_a_state_of_another_shape_is_refused():
    module = WithBatchNorm()
    own = OwnState(module, frozen(module))
    assert own.objection({"norm.running_mean": torch.zeros(9)}) == (
        "it has norm.running_mean of shape (9,), this learner has shape (4,)"
    )
    assert own.objection({"gone": torch.zeros(2)}) == "it has gone of shape (2,), this learner has no such value"


def test_a_teacher_is_recognized_as_a_copy_and_a_frozen_layer_is_not():
    module = WithTeacher()
    pairs = {f"teacher.{k}.{kind}": f"student.{k}.{kind}" for k in range(3) for kind in ("weight", "bias")}
    found = copies_of_trained(module, trained(module))
    assert found.keys() == pairs.keys()
    assert all(torch.equal(module.get_parameter(pairs[name]), module.get_parameter(found[name])) for name in pairs)
    assert copies_of_trained(TinyModel(), trained(TinyModel())) == {}


def test_copies_that_are_not_the_runs_follow_the_adopted_values(scenario, trainer_for):
    scenario.run_values, scenario.differing = 0.25, ("teacher.0.weight", "teacher.2.weight", "frozen.weight")
    torch.manual_seed(5)
    module = WithTeacher()
    before = module.frozen.weight.detach().clone(), module.teacher[0].bias.detach().clone()
    module.decay = 1.0
    trainer_for(**STEPS).fit(module)
    assert torch.equal(module.teacher[0].weight, torch.full((4, 4), 0.25))
    assert torch.equal(module.frozen.weight, before[0])
    assert torch.equal(module.teacher[0].bias, before[1])


def test_follow_does_not_change_other_parameters():
    module = WithTeacher()
    copies = copies_of_trained(module, trained(module))
    with torch.no_grad():
        module.student[0].weight.fill_(2.0)
        module.student[2].weight.fill_(3.0)
    follow(module, copies, ["teacher.0.weight", "frozen.weight"])
    assert torch.equal(module.teacher[0].weight, module.student[0].weight)
    assert not torch.equal(module.teacher[2].weight, module.student[2].weight)


def test_frozen_parameters_are_compared_as_the_script_builds_them(scenario, trainer_for, tmp_path):
    """A teacher that has changed in a checkpoint is allowed; a layer that differs from the start is another base."""
    torch.manual_seed(5)
    module = WithTeacher()
    trainer = trainer_for(**STEPS)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    first = scenario.made[-1].model
    torch.manual_seed(99)
    trainer_for(max_steps=5, limit_val_batches=0).fit(WithTeacher(), ckpt_path=tmp_path / "a.ckpt")
    resumed = scenario.made[-1].model
    assert {"teacher.0.weight"} < resumed.differing(first.frozen_digest)
    assert resumed.confirmed(first.frozen_digest) == first.frozen_digest
    other = dict(first.frozen_digest, **{"frozen.weight": "another"})
    assert resumed.confirmed(other)["frozen.weight"] != "another"


def test_a_frozen_parameter_that_differs_from_the_run_is_reported():
    model = ModelDescription({}, frozenset(), {"a": "1", "b": "2"}, None, copies={"b": "c"})
    assert model.differing({"a": "1", "b": "3"}) == {"b"}
    assert model.confirmed({"a": "1", "b": "3"}) == {"a": "1", "b": "3"}
    assert model.confirmed({"a": "4"}) == {"a": "1", "b": "2"}
