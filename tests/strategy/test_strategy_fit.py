"""Lightning's loops drive the link: its start, its steps, validation, and its end."""

import csv
import json
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.errors import ConfigError, JoinError, TransportError
from lightning_diloco.strategy.recovery.checkpointer import LearnerCheckpointer

BATCH_TOKENS = 4 * 6


def test_fit_describes_trainable_parameters_once(scenario, model, trainer_for):
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)
    described = scenario.link.model
    assert described.shapes == {"embedding.weight": (11, 4), "body.weight": (4, 4), "body.bias": (4,)}
    assert described.mean_names == {"embedding.weight"}
    assert described.frozen_digest.keys() == {"frozen.weight", "frozen.bias"}
    assert described.token_unit is None


def test_frozen_digest_differs_if_a_frozen_value_differs(scenario, model, trainer_for):
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)
    with torch.no_grad():
        model.frozen.bias[0] += 1
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)
    first, second = (link.model.frozen_digest for link in scenario.made)
    assert [name for name in first if first[name] != second[name]] == ["frozen.bias"]


def test_fit_starts_steps_validates_and_ends_in_order(scenario, model, trainer_for):
    trainer_for(max_steps=4, val_check_interval=2, num_sanity_val_steps=1).fit(model)
    val = ["evaluating", "training"]
    assert scenario.link.events == ["start", "step", "step", *val, "step", "step", "finish", "close"]
    assert len(model.validated) == 3  # the last validation is of the parameters that `fit` leaves
    assert scenario.link.steps == [(BATCH_TOKENS, "tokens")] * 4


def test_link_starts_after_the_checkpoint_and_before_sanity_validation(scenario, model, trainer_for, tmp_path):
    first = trainer_for(max_steps=2, limit_val_batches=0)
    first.fit(model)
    first.save_checkpoint(tmp_path / "a.ckpt")
    saved = model.body.weight.detach().clone()

    class Witness(Callback):
        def on_sanity_check_start(self, trainer, pl_module):
            assert scenario.made[-1].events == ["start"]

    torch.manual_seed(99)
    fresh = type(model)()
    trainer_for(max_steps=3, callbacks=Witness()).fit(fresh, ckpt_path=tmp_path / "a.ckpt")
    # The run was seeded with the restored value; at the end every anchor grew by 1.
    assert torch.equal(fresh.body.weight.detach(), saved + 1)


def test_accumulated_batches_make_one_step(scenario, model, trainer_for):
    trainer_for(max_steps=2, accumulate_grad_batches=3, limit_val_batches=0).fit(model)
    assert scenario.link.steps == [(3 * BATCH_TOKENS, "tokens")] * 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_parameters_equal_plain_training_until_the_end(scenario, model, trainer_for, precision):
    """With clipping and a learning rate schedule: the link is the only addition to a step."""

    class Schedule(type(model)):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": halving, "interval": "step"}]

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.weight, self.lr = pl_module.body.weight.detach().clone(), trainer.optimizers[0].param_groups[0]["lr"]

    found = []
    for strategy in ("decoupled_diloco", "auto"):
        torch.manual_seed(1)
        keep, candidate = Keep(), Schedule()
        torch.manual_seed(2)
        loader = torch.utils.data.DataLoader(candidate.train_dataloader().dataset, batch_size=4)
        trainer = trainer_for(
            strategy=strategy, precision=precision, gradient_clip_val=0.01, callbacks=keep, limit_val_batches=0
        )
        trainer.fit(candidate, loader)
        found.append(keep)
    assert found[0].weight.dtype == {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(
        precision, torch.float32
    )
    assert torch.equal(found[0].weight, found[1].weight)
    assert found[0].lr == found[1].lr == 0.1 / 2**4


def test_module_holds_the_drained_anchor_after_fit(scenario, model, trainer_for):
    start = model.body.weight.detach().clone()
    trainer_for(limit_val_batches=0).fit(model)
    assert torch.equal(model.body.weight.detach(), start + 1)
    assert model.head.weight is model.embedding.weight


def test_validation_sees_the_anchor_and_training_continues_with_local_parameters(scenario, model, trainer_for):
    start = model.body.weight.detach().clone()
    local = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            local[batch_idx] = pl_module.body.weight.detach().clone()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx:
                assert torch.equal(pl_module.body.weight, local[batch_idx - 1])

    trainer_for(max_steps=3, val_check_interval=1, callbacks=Keep()).fit(model)
    assert not torch.equal(local[0], start)
    *during, last = model.validated
    assert all(torch.equal(weight, start) for weight in during)
    assert torch.equal(last, start + 1)  # drained


def test_validation_sees_local_parameters_with_evaluate_local(scenario, model, trainer_for):
    start = model.body.weight.detach().clone()
    strategy = DecoupledDiLoCoStrategy(evaluate="local")
    trainer_for(strategy=strategy, max_steps=2, val_check_interval=1, num_sanity_val_steps=0).fit(model)
    assert not torch.equal(model.validated[0], start)
    assert torch.equal(model.validated[1], start + 1)  # the parameters that `fit` leaves
    assert scenario.link.events[2:4] == ["evaluating", "training"]


def test_joiner_trains_from_the_adopted_anchor(scenario, model, trainer_for):
    scenario.run_values = 0.25
    trainer_for(max_steps=1, num_sanity_val_steps=1).fit(model)
    assert torch.equal(model.validated[0], torch.full((4, 4), 0.25))


def test_manual_optimization_steps_once_per_training_step(scenario, trainer_for, model):
    class Manual(type(model)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:  # earlier batches only accumulate
                for optimizer in self.optimizers():
                    optimizer.step()
            assert len(scenario.link.steps) == batch_idx // 2

        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=0.0) for m in (self.body, self.embedding)]

    trainer = trainer_for(max_steps=-1, max_epochs=1, limit_train_batches=4, limit_val_batches=0)
    trainer.fit(Manual())
    assert scenario.link.steps == [(2 * BATCH_TOKENS, "tokens")] * 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_settles_after_the_last_backward_and_before_gradients_are_clipped(scenario, model, trainer_for, precision):
    class Witness(Callback):
        def __init__(self):
            self.seen = []

        def on_after_backward(self, trainer, pl_module):
            self.seen.append(("backward", scenario.link.num_settled))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):  # clipping follows it
            self.seen.append(("update", scenario.link.num_settled))

    witness = Witness()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": precision, "limit_val_batches": 0}
    trainer_for(max_steps=2, callbacks=witness, **options).fit(model)
    assert witness.seen == [
        ("backward", 0),
        ("backward", 0),
        ("update", 1),
        ("backward", 1),
        ("backward", 1),
        ("update", 2),
    ]


@pytest.mark.parametrize("kind", ["SGD", "LBFGS", "two by hand"])
def test_settles_before_parameters_change(scenario, model, trainer_for, kind):
    class Candidate(type(model)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = kind != "two by hand"

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if not self.automatic_optimization:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def configure_optimizers(self):
            if kind == "two by hand":
                return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.body, self.embedding)]
            return getattr(torch.optim, kind)([p for p in self.parameters() if p.requires_grad], lr=0.1)

    limit = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 3} if kind == "two by hand" else {"max_steps": 3}
    trainer_for(limit_val_batches=0, **limit).fit(Candidate())
    assert len(scenario.link.steps) == 3
    assert scenario.link.unchanged == [True, True]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_other_verbs_need_no_link(scenario, model, trainer_for, verb):
    assert getattr(trainer_for(), verb)(model) is not None
    assert scenario.made == []


def test_fast_dev_run_needs_no_link(scenario, model, trainer_for):
    trainer_for(fast_dev_run=2).fit(model)
    assert scenario.made == []


def test_tuners_need_no_link(scenario, model, trainer_for):
    tuner = Tuner(trainer_for(limit_val_batches=0))
    tuner.scale_batch_size(model, init_val=2, max_trials=2, steps_per_trial=1)
    tuner.lr_find(model, num_training=5)
    assert scenario.made == []


def test_tuner_during_training_exchanges_nothing(scenario, model, trainer_for):
    class AfterOneEpoch(LearningRateFinder):
        def on_fit_start(self, trainer, pl_module): ...

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                before = pl_module.body.weight.detach().clone()
                self.lr_find(trainer, pl_module)
                assert torch.equal(pl_module.body.weight, before)

    finder = AfterOneEpoch(num_training_steps=3, update_attr=False)
    trainer_for(max_steps=-1, max_epochs=2, limit_train_batches=2, limit_val_batches=0, callbacks=finder).fit(model)
    steps = ["step", "step"]
    assert scenario.link.events == ["start", *steps, "evaluating", "training", *steps, "finish", "close"]
    assert scenario.link.steps == [(BATCH_TOKENS, "tokens")] * 4


def test_exception_in_validation_restores_local_parameters_and_closes(scenario, model, trainer_for):
    start = model.body.weight.detach().clone()

    def fail(batch, batch_idx):
        assert torch.equal(model.body.weight, start)
        raise RuntimeError("broken metric")

    model.validation_step = fail
    with pytest.raises(RuntimeError, match="broken metric"):
        trainer_for(val_check_interval=2, num_sanity_val_steps=0).fit(model)
    assert not torch.equal(model.body.weight, start)
    assert scenario.link.events[-1] == "close"
    assert "finish" not in scenario.link.events


def test_error_from_the_background_stops_training(scenario, model, trainer_for):
    scenario.step_error = TransportError("gone")
    with pytest.raises(TransportError, match="gone"):
        trainer_for(limit_val_batches=0).fit(model)
    assert scenario.link.events == ["start", "step", "close"]


def test_failed_join_closes_the_link(scenario, model, trainer_for):
    scenario.start_error = JoinError("no such run")
    with pytest.raises(JoinError):
        trainer_for().fit(model)
    assert scenario.link.events == ["start", "close"]


def test_fit_without_a_step_leaves_the_run(scenario, model, trainer_for):
    trainer_for(limit_train_batches=0, limit_val_batches=0).fit(model)
    assert scenario.link.events == ["start", "finish", "close"]


def test_two_fits_use_two_links(scenario, model, trainer_for):
    trainer = trainer_for(max_steps=1, limit_val_batches=0)
    trainer.fit(model)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(model)
    assert [link.events[-1] for link in scenario.made] == ["close", "close"]


def test_model_without_trainable_parameters_is_refused(scenario, model, trainer_for):
    model.configure_optimizers = lambda: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        trainer_for().fit(model)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_lazy_parameters_are_refused_by_name(scenario, model, trainer_for, tmp_path, is_resumed):
    if is_resumed:
        trainer = trainer_for(max_steps=1, limit_val_batches=0, strategy="auto")
        trainer.fit(model)
        trainer.save_checkpoint(tmp_path / "plain.ckpt")
    lazy = type(model)()
    lazy.body = torch.nn.LazyLinear(4)
    with pytest.raises(ConfigError, match=r"'body.weight' has no shape yet: .* materialize a lazy one first"):
        trainer_for(limit_val_batches=0).fit(lazy, ckpt_path=tmp_path / "plain.ckpt" if is_resumed else None)
    assert scenario.made == []


def test_empty_parameters_are_not_exchanged(scenario, model, trainer_for):
    model.empty = torch.nn.Parameter(torch.empty(0, 4))
    trainer_for(max_steps=2, limit_val_batches=0).fit(model)
    assert scenario.link.model.shapes.keys() == {"embedding.weight", "body.weight", "body.bias"}
    assert "empty" in scenario.link.model.frozen_digest
    assert len(scenario.link.steps) == 2


def test_metrics_are_logged_with_the_users_metrics(scenario, model, trainer_for, tmp_path):
    logger = CSVLogger(tmp_path)
    trainer_for(logger=logger, log_every_n_steps=2, limit_val_batches=0).fit(model)
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert [(r["step"], r["diloco/steps"]) for r in rows if r["diloco/steps"]] == [("1", "2.0"), ("3", "4.0")]
    assert [r["step"] for r in rows if r["train_loss"]] == ["1", "3"]


def test_root_dir_is_that_of_the_trainer(scenario, model, trainer_for, tmp_path):
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)
    assert scenario.link.root_dir == Path(tmp_path)


def test_random_numbers_differ_between_learners_with_equal_seeds(scenario, trainer_for, model):
    noise = []
    for scenario.learner_id in ("l0", "l1", "l0"):
        L.seed_everything(3, verbose=False)
        candidate = type(model)()
        trainer_for(max_steps=2, limit_val_batches=0).fit(candidate)
        noise.append(json.dumps(candidate.noise))
    assert noise[0] == noise[2] != noise[1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_strategy_holds_a_fit_only_while_it_trains(scenario, model, trainer_for, fails):
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(trainer.strategy._fit)
            if fails:
                raise ZeroDivisionError

    trainer = trainer_for(max_steps=2, callbacks=[Look()])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            trainer.fit(model)
        assert trainer.strategy._fit is None
        trainer.fit_loop.epoch_loop.max_steps += 2
    assert None not in seen
    assert len(set(map(id, seen))) == len(scenario.made) == 2
    trainer.validate(model)
    assert trainer.strategy.membership is None
    assert trainer.strategy.fleet_tokens == 0


def test_the_link_is_closed_although_another_part_of_the_fit_fails_to_close(scenario, model, trainer_for, monkeypatch):
    really = LearnerCheckpointer.close

    def close(self):
        really(self)
        raise ZeroDivisionError

    monkeypatch.setattr(LearnerCheckpointer, "close", close)
    with pytest.raises(ZeroDivisionError):
        trainer_for(max_steps=2).fit(model)
    assert scenario.link.events[-1] == "close"
