"""A restarted learner continues from its checkpoint: moments, rates, random numbers, data and progress."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EMAWeightAveraging, WeightAveraging
from torch.utils.data import DataLoader

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.strategy.hooks import DiLoCoHooks
from lightning_diloco.strategy.recovery import checkpointer
from tests.strategy.conftest import Sequences, TinyModel
from tests.strategy.models import OWN_STATE
from tests.strategy.optimizers import ScheduleFree

MAX_STEPS = 16


class KilledError(Exception):
    """Raised where a real process would be killed."""


class Watch(Callback):
    """Records the initial state of a process and its steps."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at = dies_at
        self.moments: dict[int, list[torch.Tensor]] = {}
        self.rates: list[float] = []
        self.noise: list[tuple[float, float]] = []
        self.validated_at: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        state = trainer.optimizers[0].state_dict()["state"]
        self.moments[trainer.global_step] = [values[k].clone() for values in state.values() for k in sorted(values)]
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if trainer.global_step == self.dies_at:
            raise KilledError

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.noise.append((random.random(), float(np.random.rand())))
        # A step takes a millisecond, and no checkpoint is taken while another one is written.
        trainer.strategy._present.checkpointer.wait(10.0)

    def on_validation_end(self, trainer, pl_module):
        self.validated_at += [] if trainer.sanity_checking else [trainer.global_step]

    @property
    def begins_at(self) -> int:
        return min(self.moments)


@pytest.fixture
def process(scenario, model, trainer_for, tmp_path, monkeypatch):
    """Runs a learner as one process after another; returns its model and the records."""
    number = iter(range(100))

    class Adam(type(model)):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9, 9, 13], gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def run(name="l0", *, dies_at=None, is_new=True, every=4, kind=Adam, ckpt_path=None, datamodule=None, **options):
        if is_new:
            monkeypatch.setattr(checkpointer, "PROCESS", f"process {next(number)}")
        torch.manual_seed(7)
        made, watch = kind(), Watch(dies_at)
        scenario.learner_id = name
        strategy = DecoupledDiLoCoStrategy(
            sync_every=4, checkpoint_every=every, checkpoint_store=str(tmp_path / "store")
        )
        defaults = {"max_steps": MAX_STEPS, "limit_val_batches": 0, "callbacks": [watch]}
        trainer = trainer_for(strategy=strategy, **{**defaults, **options})
        if dies_at is None:
            trainer.fit(made, ckpt_path=ckpt_path, datamodule=datamodule)
        else:
            with pytest.raises(KilledError):
                trainer.fit(made, datamodule=datamodule)
        return made, watch

    run.kind = Adam
    return run


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "store" / "run"))


@pytest.mark.parametrize(("part", "at"), [(None, 8), (None, 6), ((1, 2), 5), ((1, 2), 6)])
def test_a_second_process_continues_exactly_from_the_checkpoint(scenario, process, part, at):
    scenario.data_part = part  # an epoch has 6 batches, or 3 with a part
    whole, undisturbed = process(every=0)
    _, first = process(every=at, dies_at=at + 1)
    scenario.incarnation = 2
    second, back = process()
    assert back.begins_at == at
    for theirs, ours in zip(first.moments[at], back.moments[at], strict=True):
        assert torch.equal(theirs, ours)
    assert any(moment.abs().max() > 0 for moment in back.moments[at])
    batch_size = len(whole.seen) // MAX_STEPS
    assert second.seen == whole.seen[at * batch_size :]
    assert second.noise == whole.noise[at:]
    assert back.noise == undisturbed.noise[at:]
    assert back.rates == undisturbed.rates[at:]
    assert second.trainer.global_step == MAX_STEPS
    assert second.trainer.fit_loop.epoch_loop._batches_that_stepped == MAX_STEPS


def test_without_its_checkpoint_a_learner_starts_at_the_beginning(process):
    process(dies_at=9)
    _, back = process(every=0)
    assert back.begins_at == 0


@pytest.mark.seconds
def test_no_checkpoint_is_taken_while_gradients_accumulate(process):
    whole, _ = process("l0", every=0, accumulate_grad_batches=2)
    process(every=3, dies_at=5, accumulate_grad_batches=2)
    second, back = process(accumulate_grad_batches=2)
    assert back.begins_at == 3
    assert second.seen == whole.seen[3 * 2 * 4 :]
    assert second.trainer.global_step == MAX_STEPS


def test_validation_continues_at_its_interval(process):
    options = {"limit_val_batches": 1, "val_check_interval": 4, "check_val_every_n_epoch": None}
    process(every=4, dies_at=5, **options)
    _, back = process(**options)
    assert (back.begins_at, back.validated_at) == (4, [8, 12, 16])


def test_a_peers_checkpoint_is_used_if_there_is_no_own_one(scenario, process, caplog):
    _, peer = process("peer", dies_at=9)
    scenario.is_late = True
    _, back = process("other")
    assert "other goes on from peer peer's checkpoint of step 8" in caplog.text
    assert back.begins_at == 8
    assert all(torch.equal(a, b) for a, b in zip(peer.moments[8], back.moments[8], strict=True))
    assert back.rates[0] == peer.rates[8]
    assert back.noise[0] != peer.noise[8], "random numbers are a learner's own"


class Stateful(DataLoader):
    """A loader that keeps its own position, like torchdata's."""

    given = None

    def state_dict(self):
        return {"position": 1}

    def load_state_dict(self, state_dict):
        self.given = state_dict


@pytest.mark.parametrize(("name", "given"), [("peer", {"position": 1}), ("other", None)])
def test_the_position_of_a_loader_is_not_taken_over_from_a_peer(scenario, process, name, given):
    class WithStateful(process.kind):
        def train_dataloader(self):
            return Stateful(Sequences(), batch_size=4)

    process("peer", dies_at=9, kind=WithStateful)
    scenario.is_late = True
    back, _ = process(name, kind=WithStateful)
    assert back.trainer.train_dataloader.given == given


@pytest.mark.seconds
@pytest.mark.parametrize("place", [(2, 2, "reads part 0 like another"), (None, 1, "not split")])
@pytest.mark.filterwarnings("ignore:The training data:UserWarning", "ignore:There are more learners:UserWarning")
def test_a_newcomer_reads_other_batches_than_the_peer_whose_checkpoint_it_uses(scenario, process, place, recwarn):
    parts, slot, said = place
    scenario.data_part = parts and (0, parts)
    process("peer", every=8, dies_at=9)
    undisturbed, _ = process("peer", every=0)
    scenario.is_late, scenario.slot = True, slot
    new, watch = process("new")
    assert watch.begins_at == 8
    assert len(new.seen) == len(undisturbed.seen) // 2
    theirs, its = undisturbed.seen[len(new.seen) :], new.seen
    batches = [(theirs[k : k + 4], its[k : k + 4]) for k in range(0, len(its), 4)]
    assert not any(sorted(a) == sorted(b) for a, b in batches)
    assert any(said in str(warning.message) for warning in recwarn)


def test_an_own_checkpoint_is_preferred_to_a_newer_one_of_a_peer(process):
    process("l0", dies_at=5)
    process("peer", dies_at=13)
    _, back = process("l0")
    assert back.begins_at == 4


def test_a_checkpoint_of_a_peer_with_nan_is_skipped(process, caplog):
    class Diverged(process.kind):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("nan")

    process("sound", dies_at=5)
    process("sick", dies_at=9, kind=Diverged)
    _, back = process("other")
    assert back.begins_at == 4
    assert "NaN or Inf" in caplog.text


def test_moments_of_another_optimizer_are_not_restored(process, model, caplog):
    process(dies_at=9)
    _, back = process(kind=type(model))
    assert back.begins_at == 0
    assert "it is of ['torch.optim.adamw.AdamW', " in caplog.text


def test_a_torn_checkpoint_is_skipped_with_a_warning(process, store, caplog):
    process(dies_at=9)
    newest, older = store.entries("l0")
    path = Path(store.url, "l0", newest.name)
    path.write_bytes(path.read_bytes()[:-100])
    _, back = process()
    assert back.begins_at == older.step == 4
    assert f"the checkpoint {path} has the digest" in caplog.text


def test_the_users_checkpoint_takes_precedence(process, tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "mine.ckpt")

    process(every=0, max_steps=3, callbacks=[Save()])
    process(dies_at=9)
    _, back = process(ckpt_path=tmp_path / "mine.ckpt")
    assert back.begins_at == 2


def test_a_second_fit_of_the_same_process_begins_anew(process):
    process(dies_at=9)
    _, again = process(is_new=False)
    assert again.begins_at == 0


def test_two_checkpoints_of_each_learner_are_kept(process, store):
    process(every=2)
    assert [entry.step for entry in store.entries("l0")] == [14, 12]


def test_a_store_that_fails_does_not_stop_training(process, tmp_path, caplog):
    (tmp_path / "store").write_text("a file")
    made, _ = process(every=2)
    assert made.trainer.global_step == MAX_STEPS
    assert caplog.text.count("no checkpoint was written, training goes on") == 1


def test_callbacks_that_cannot_be_stored_cause_one_warning_and_the_rest_is_stored(process, store, caplog):
    class Odd(Callback):
        def state_dict(self):
            return {"path": Path("x")}

    watch = Watch(9)
    process(dies_at=9, callbacks=[Odd(), watch])
    assert [entry.step for entry in store.entries("l0")] == [8, 4]
    assert caplog.text.count(".path is a PosixPath") == 1


class KeepsByHooks(TinyModel):
    """State that the module stores by Lightning's hooks."""

    num_seen, had = 0, None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.num_seen += 1

    def on_save_checkpoint(self, checkpoint):
        assert checkpoint["global_step"] == self.trainer.global_step
        checkpoint["num_seen"] = self.num_seen
        del checkpoint["state_dict"]["frozen.weight"]  # a common way to make checkpoints small
        checkpoint["optimizer_states"].clear()

    def on_load_checkpoint(self, checkpoint):
        self.had = self.num_seen = checkpoint["num_seen"]
        assert not torch.equal(checkpoint["state_dict"]["body.weight"], torch.zeros(4, 4))


class AverageAt(Callback):
    """Records the average at the start of each batch."""

    def __init__(self, average):
        self.average, self.found, self.weights = average, {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights.append(pl_module.body.weight.detach().clone())
        self.found[trainer.global_step] = {k: v.clone() for k, v in self.average._average_model.state_dict().items()}


@pytest.mark.parametrize("kind", [WeightAveraging, EMAWeightAveraging])
def test_entries_that_hooks_add_to_a_checkpoint_are_restored_and_live_state_is_unchanged(
    scenario, process, store, kind
):
    first, second, third = (AverageAt(kind()) for _ in range(3))
    process(kind=KeepsByHooks, every=0, callbacks=[third.average, third])
    process(kind=KeepsByHooks, dies_at=6, callbacks=[first.average, first, Watch(6)])
    assert all(torch.equal(value, third.found[5][name]) for name, value in first.found[5].items())
    hooks = store.read(store.entries("l0")[0]).state["hooks"]
    added = {name: set(each["added"]) for name, each in hooks.items()}
    assert added[f"{first.average.state_key}.on_save_checkpoint"] == {"state_dict", "averaging_state"}
    assert added["KeepsByHooks.on_save_checkpoint"] == {"num_seen"}
    scenario.run_values = 0.25  # the average does not overwrite the run's parameters
    made, _ = process(kind=KeepsByHooks, callbacks=[second.average, second])
    assert (made.had, made.num_seen, min(second.found)) == (4, MAX_STEPS, 4)
    assert all(torch.equal(value, first.found[4][name]) for name, value in second.found[4].items())
    assert second.found[4]["n_averaged"] > 0
    assert torch.equal(second.weights[0], torch.full((4, 4), 0.25))


def test_a_newcomer_does_not_take_over_entries_of_a_peers_hooks(scenario, process):
    process("peer", kind=KeepsByHooks, dies_at=5)
    scenario.is_late = True
    made, back = process("other", kind=KeepsByHooks)
    assert (made.had, back.begins_at) == (None, 4)


def test_a_hook_whose_entries_cannot_be_stored_causes_one_warning_and_is_not_called_on_load(process, caplog):
    class Odd(KeepsByHooks):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["num_seen"] = Path("x")

    process(kind=Odd, dies_at=9)
    made, back = process(kind=Odd)
    assert (made.had, back.begins_at) == (None, 8)
    assert caplog.text.count("Odd.on_save_checkpoint.added.num_seen is a PosixPath") == 2  # once in each process


def test_a_hook_that_loads_trained_parameters_does_not_replace_the_runs_values(scenario, process):
    class Backbone(KeepsByHooks):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["backbone"] = self.body.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.body.load_state_dict(checkpoint["backbone"])
            self.had = self.body.weight.detach().clone()

    process(kind=Backbone, dies_at=6)
    scenario.run_values = 0.25

    class First(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if not hasattr(self, "weight"):
                self.weight = pl_module.body.weight.detach().clone()

    made, _ = process(kind=Backbone, callbacks=[first := First()])
    assert not torch.equal(made.had, torch.full((4, 4), 0.25)), "the hook loads older ones"
    assert torch.equal(first.weight, torch.full((4, 4), 0.25))


def test_a_failing_hook_is_named_and_training_continues(process, caplog):
    class Broken(KeepsByHooks):
        def on_save_checkpoint(self, checkpoint):
            raise RuntimeError("no space")

    made, _ = process(kind=Broken)
    assert made.num_seen == MAX_STEPS
    assert caplog.text.count("Broken.on_save_checkpoint failed (RuntimeError: no space)") == 1


def test_two_equal_callbacks_keep_separate_states(process):
    class Counts(Callback):
        def __init__(self, number):
            self.number, self.had = number, None

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            assert "epoch_loop.batch_progress" in checkpoint["loops"]["fit_loop"]
            checkpoint["number"] = self.number

        def on_load_checkpoint(self, trainer, pl_module, checkpoint):
            self.had = checkpoint["number"]

    process(dies_at=6, callbacks=[Watch(6), Counts(1), Counts(2)])
    again = [Counts(3), Counts(4)]
    process(callbacks=[Watch(None), *again])
    assert [each.had for each in again] == [1, 2]


def test_hooks_that_are_not_called_for_a_sharded_model_are_named_once(process, caplog, monkeypatch):
    monkeypatch.setattr(DiLoCoHooks, "_holds_all", False)
    process(kind=KeepsByHooks, dies_at=9)
    made, back = process(kind=KeepsByHooks, every=100)
    assert (made.had, back.begins_at) == (None, 8)
    assert caplog.text.count("KeepsByHooks.on_save_checkpoint is not called") == 1


def test_the_state_of_a_datamodule_is_restored(process, model):
    class Counting(L.LightningDataModule):
        given = 0
        came_back: dict[str, int] | None = None

        def train_dataloader(self):
            return model.train_dataloader()

        def val_dataloader(self):
            return model.val_dataloader()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.given += 1
            return batch

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state_dict):
            self.came_back = state_dict

    process(dies_at=5, datamodule=Counting())
    again = Counting()
    process(datamodule=again)
    assert again.came_back == {"given": 5}
    other = Counting()
    process("other", datamodule=other)
    assert other.came_back is None, "a peer's position is not mine"


def test_a_late_learner_without_any_checkpoint_warms_its_optimizer_up(scenario, process, model):
    used = []

    class Spied(type(model)):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            step = optimizer.step
            optimizer.step = lambda closure=None: used.append(optimizer.param_groups[0]["lr"]) or step(closure)
            return optimizer

    scenario.is_late = True
    _, watch = process(kind=Spied, every=0)
    assert used[:6] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
    assert set(watch.rates) == {0.1}


def test_the_first_learners_of_a_run_do_not_warm_up(process, model, caplog):
    caplog.set_level(logging.INFO)
    process(kind=type(model), every=0)
    assert "warms up" not in caplog.text


def test_copies_in_an_optimizer_are_restored_relative_to_the_runs_parameters(scenario, process, model):
    class Free(type(model)):
        def configure_optimizers(self):
            return ScheduleFree([p for p in self.parameters() if p.requires_grad], lr=0.1)

    class Beside(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            z = trainer.optimizers[0].state[pl_module.body.weight].get("z")
            self.found = [*getattr(self, "found", []), None if z is None else z - pl_module.body.weight.detach()]

    first, second = Beside(), Beside()
    process(dies_at=5, kind=Free, callbacks=[first, Watch(5)])
    scenario.run_values = 0.25  # values of the run meanwhile
    process(kind=Free, callbacks=[second])
    assert first.found[4].abs().max() > 1e-3
    assert torch.allclose(second.found[0], first.found[4], atol=1e-6)


@pytest.mark.parametrize("name", ["l0", "other"])
def test_unfrozen_parameters_are_trained_after_a_restart(scenario, process, name):
    class WithBackbone(process.kind):
        def __init__(self):
            super().__init__()
            self.backbone = self.body

    class Rates(Watch):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            self.rates[-1] = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def fit(who, dies_at=None, every=4):
        watch = Rates(dies_at)
        finetuning = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01, verbose=False)
        made, _ = process(who, kind=WithBackbone, callbacks=[finetuning, watch], dies_at=dies_at, every=every)
        return made, watch

    _, whole = fit("l0", every=0)
    _, first = fit("l0", dies_at=9)  # an epoch has 6 batches
    scenario.is_late = name != "l0"
    model, back = fit(name)
    assert back.begins_at == 8
    assert len(back.moments[8]) == len(first.moments[8])
    for theirs, ours in zip(first.moments[8], back.moments[8], strict=True):
        assert torch.equal(theirs, ours)
    assert back.rates == whole.rates[8:]
    assert {len(rates) for rates in back.rates} == {2}
    assert model.backbone.weight.requires_grad
    assert not torch.equal(back.moments[8][-1], back.moments[MAX_STEPS - 1][-1])


def test_moments_are_not_restored_for_groups_of_other_parameters(process, caplog):
    class Split(process.kind):
        def configure_optimizers(self):
            return torch.optim.AdamW([{"params": self.head.parameters()}, {"params": self.body.parameters()}])

    class SplitOtherwise(process.kind):
        def configure_optimizers(self):
            return torch.optim.AdamW([{"params": self.body.parameters()}, {"params": self.head.parameters()}])

    process(dies_at=5, kind=Split)
    _, back = process(kind=SplitOtherwise)
    assert back.begins_at == 0
    assert "does not fit: groups of its optimizer 0 hold other parameters: [1, 2] of them, here [2, 1]" in caplog.text


@pytest.mark.parametrize("kind", OWN_STATE)
@pytest.mark.parametrize("name", ["l0", "other"])
def test_own_state_of_the_module_is_restored_and_newcomers_use_that_of_a_peer(scenario, process, kind, name):
    class Keep(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            found = {each: value.clone() for each, value in pl_module.state_dict().items() if each in OWN_STATE[kind]}
            self.states = {**getattr(self, "states", {}), trainer.global_step: found}

    first, second = Keep(), Keep()
    process(dies_at=5, kind=kind, callbacks=[first, Watch(5)])
    scenario.is_late = name != "l0"
    process(name, kind=kind, callbacks=[second])
    assert min(second.states) == 4
    for each, value in first.states[4].items():
        assert torch.equal(second.states[4][each], value), each
    assert any(not torch.equal(value, first.states[0][each]) for each, value in first.states[4].items())
