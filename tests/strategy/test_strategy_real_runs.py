"""Lightning drives the real link to a real syncer process: common uses, at the smallest size.

After each test, `runs` waits until no syncer is left.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from safetensors.torch import load_file

import lightning_diloco
from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.hf.export import PARAMETERS
from lightning_diloco.strategy.trainer.lightning_checkpoints import CHECKPOINT_KEY
from tests.strategy.conftest import LENGTH

pytestmark = pytest.mark.slow

GONE_WITHIN_S = 10.0  # 2 s on an idle machine
BATCH_TOKENS = 4 * LENGTH


class Runs:
    """The runs that were started below a folder, the oldest first."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __len__(self) -> int:
        return len(list(self._root.glob("diloco/*")))

    def summaries(self) -> list[dict[str, Any]]:
        self.wait()
        return [json.loads(path.read_text()) for path in sorted(self._root.glob("diloco/*/summary.json"))]

    @property
    def summary(self) -> dict[str, Any]:
        (only,) = self.summaries()
        return only

    def syncers(self) -> list[psutil.Process]:
        mine = f"--run-dir {self._root}"
        return [p for p in psutil.process_iter(["cmdline"]) if mine in " ".join(p.info["cmdline"] or ())]

    def wait(self) -> None:
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while self.syncers():
            assert time.monotonic() < deadline_s, "a syncer is left"
            time.sleep(0.05)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = Runs(tmp_path)
    yield found
    found.wait()


@pytest.fixture
def fit(runs, trainer_for):
    """Fits with few fragments that are due often, so that a few steps are enough for exchanges."""

    def run(model, ckpt_path=None, **options):
        strategy = DecoupledDiLoCoStrategy(sync_every=4, num_fragments=2, overlap=1)
        trainer = trainer_for(**{"strategy": strategy, "max_steps": 12, **options})
        trainer.fit(model, ckpt_path=ckpt_path)
        return trainer

    return run


def val_loss(model) -> float:
    with torch.no_grad():
        return model.loss(next(iter(model.val_dataloader()))).item()


def test_the_strategy_name_trains_and_leaves_the_anchor_and_a_summary(runs, model, trainer_for):
    trainer = trainer_for(max_steps=30)
    trainer.fit(model)
    assert trainer.global_step == 30
    summary = runs.summary
    assert summary["status"] == "finished"
    assert summary["rounds"] > 0
    assert summary["tokens_merged"] == summary["tokens_seen"] == 30 * BATCH_TOKENS * len(summary["versions"])
    assert summary["tokens_pending"] == 0
    assert summary["ledger_exact"]
    assert summary["eval_loss"] == pytest.approx(val_loss(model))  # the module holds that anchor


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"max_steps": -1, "max_epochs": 2},
        {"max_steps": -1, "max_time": {"seconds": 2}},
        {"limit_val_batches": 0},
    ],
    ids=str,
)
def test_trainer_options_work(runs, fit, model, options):
    class Schedule(type(model)):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

    candidate = Schedule()
    trainer = fit(candidate, **options)
    steps, summary = trainer.global_step, runs.summary
    tokens = steps * BATCH_TOKENS * options.get("accumulate_grad_batches", 1)
    assert steps > 0
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1 ** (steps // 3))
    assert candidate.body.weight.dtype == {"bf16-true": torch.bfloat16}.get(options.get("precision"), torch.float32)
    assert summary["status"] == "finished"
    assert summary["tokens_seen"] == summary["tokens_merged"] == tokens * 2
    if options.get("limit_val_batches") == 0:
        assert summary["eval_loss"] is None
        assert "limit_val_batches=0" in summary["eval_reason"]
    else:
        assert summary["eval_loss"] == pytest.approx(val_loss(candidate), rel=2e-2)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used")
def test_checkpoints_and_early_stopping_work(runs, fit, model, trainer_for, tmp_path):
    keep = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_last=True, filename="best")
    stop = EarlyStopping("val_loss", patience=1, min_delta=1e9)  # no value is an improvement
    trainer = fit(
        model, max_steps=100, val_check_interval=2, enable_checkpointing=True, callbacks=[keep, stop],
        num_sanity_val_steps=0,
    )  # fmt: skip
    assert trainer.global_step == 4
    assert runs.summary["status"] == "finished"
    fresh = type(model)()
    found = trainer_for(strategy="auto").validate(fresh, ckpt_path=keep.best_model_path, verbose=False)
    assert found[0]["val_loss"] == pytest.approx(keep.best_model_score.item())


def test_a_learner_that_resumes_alone_continues_at_its_position(runs, fit, model, tmp_path):
    saved = {}

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 6 and not saved:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")
                saved["weight"] = pl_module.body.weight.detach().clone()

    class Compare(Callback):
        def on_train_start(self, trainer, pl_module):
            assert trainer.global_step == 6
            assert torch.equal(pl_module.body.weight, saved["weight"])

    fit(model, callbacks=Save())
    own = torch.load(tmp_path / "mid.ckpt", weights_only=True)
    assert not torch.equal(own["state_dict"]["body.weight"], own[CHECKPOINT_KEY]["local"]["body.weight"])
    trainer = fit(type(model)(), ckpt_path=tmp_path / "mid.ckpt", callbacks=Compare())
    assert trainer.global_step == 12
    assert [s["tokens_seen"] for s in runs.summaries()] == [12 * BATCH_TOKENS * 2, 6 * BATCH_TOKENS * 2]


def test_verbs_that_do_not_train_start_no_syncer(runs, model, trainer_for):
    trainer_for(fast_dev_run=True).fit(model)
    trainer = trainer_for()
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    assert trainer.predict(model)
    assert len(runs) == 0


def test_learning_rate_finder_then_fit(runs, model, trainer_for):
    trainer = trainer_for(max_steps=8)
    Tuner(trainer).lr_find(model, num_training=5)
    assert len(runs) == 0
    trainer.fit(model)
    assert runs.summary["tokens_seen"] == 8 * BATCH_TOKENS * len(runs.summary["versions"])


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_exception_leaves_local_parameters_and_no_syncer(runs, fit, model, where):
    local = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            local.append(pl_module.body.weight.detach().clone())

    step = getattr(model, where)

    def fail(batch, batch_idx):
        if len(local) == 6:
            raise RuntimeError("broken")
        return step(batch, batch_idx)

    setattr(model, where, fail)
    with pytest.raises(RuntimeError, match="broken"):
        fit(model, callbacks=Keep(), val_check_interval=6)
    assert torch.equal(model.body.weight, local[-1])
    summary = runs.summary
    assert summary["status"] == "interrupted"
    assert summary["tokens_seen"] == 6 * BATCH_TOKENS * 2
    assert summary["tokens_seen"] == summary["tokens_merged"] + sum(summary["tokens_discarded"].values())


def test_interrupt_ends_gracefully(runs, fit, model):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit(model, callbacks=Interrupt())
    finally:
        signal.signal(signal.SIGINT, before)
    assert runs.summary["status"] == "interrupted"
    assert runs.summary["tokens_pending"] == 0


def test_fits_of_one_process_are_runs_of_their_own(runs, fit, model):
    fit(model)
    middle = model.body.weight.detach().clone()
    fit(model)
    assert not torch.equal(model.body.weight, middle)
    assert [summary["status"] for summary in runs.summaries()] == ["finished", "finished"]


class KillSyncer(Callback):
    """Kills the syncer with SIGKILL at step 6; keeps the last parameters of training."""

    def __init__(self, runs: Runs, then: Callable[[], object] = lambda: None) -> None:
        self._runs, self._then = runs, then

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 6:
            (syncer,) = self._runs.syncers()
            self._then()
            syncer.kill()
        self.weight = pl_module.body.weight.detach().clone()


def test_a_killed_syncer_is_restarted_and_nothing_is_lost(runs, fit, model):
    fit(model, max_steps=18, callbacks=KillSyncer(runs))
    summary = runs.summary
    assert summary["status"] == "finished"
    assert summary["tokens_seen"] == summary["tokens_merged"] == 18 * BATCH_TOKENS * 2
    assert summary["tokens_pending"] == 0
    assert summary["ledger_exact"]


def test_a_syncer_that_never_comes_back_leaves_the_trained_parameters(runs, model, trainer_for, tmp_path, caplog):
    strategy = DecoupledDiLoCoStrategy(sync_every=4, num_fragments=2, overlap=1, drain_s=1.0)
    kill = KillSyncer(runs, then=lambda: [path.unlink() for path in tmp_path.glob("diloco/*/join")])
    keep = ModelCheckpoint(tmp_path / "kept", save_last=True)
    trainer_for(strategy=strategy, max_steps=18, enable_checkpointing=True, callbacks=[kill, keep]).fit(model)
    assert torch.equal(model.body.weight, kill.weight)
    assert torch.equal(torch.load(keep.last_model_path, weights_only=True)["state_dict"]["body.weight"], kill.weight)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("was left at step 18 before all of this learner's work was merged" in text for text in said) == 1


def test_a_run_is_read_and_exported_in_python(fit, model, runs, tmp_path) -> None:
    fit(model)
    runs.wait()
    (run_dir,) = tmp_path.glob("diloco/*")
    history = lightning_diloco.run_history(run_dir)
    assert history.events["event"].to_pylist() == ["join", "leave"]
    assert history.summary["fleet_tokens"] == 12 * BATCH_TOKENS
    assert max(history.progress["fleet_tokens"].to_pylist(), default=0) <= 12 * BATCH_TOKENS  # progress notes are rare
    assert set(history.commits["fragment"].to_pylist()) == {0, 1}
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.nn.init.zeros_(next(model.parameters()))
    lightning_diloco.load_anchor(run_dir, model)
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    found = lightning_diloco.export_run(run_dir, tmp_path / "exported")
    assert load_file(found.folder / PARAMETERS).keys() == {
        name for name, p in model.named_parameters() if p.requires_grad
    }
