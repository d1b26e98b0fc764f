"""SIGTERM: the learner leaves cleanly with a checkpoint, and the process ends in time even if a thread hangs."""

from __future__ import annotations

import os
import queue
import signal
import time
from functools import partial

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.cli.local import fleet
from lightning_diloco.storage.checkpoint_store import CheckpointStore
from lightning_diloco.strategy import fit as fits
from lightning_diloco.strategy.recovery import checkpointer
from lightning_diloco.strategy.trainer.preemption import EXIT_CODE, RESERVE_S, Preemption

WITHIN_S = 10.0


@pytest.fixture(autouse=True)
def _this_process_stays(monkeypatch):
    """Keep the guard from ending the test process."""
    monkeypatch.setattr(fits, "Preemption", partial(Preemption, end=lambda code: None))


@pytest.fixture
def fit(scenario, model, trainer_for, tmp_path):
    def run(callback, every=100, **options):
        store = str(tmp_path / "store")
        strategy = DecoupledDiLoCoStrategy(sync_every=4, checkpoint_every=every, checkpoint_store=store)
        quiet = {"limit_val_batches": 0, "callbacks": [callback]}
        trainer = trainer_for(strategy=strategy, **{"max_steps": 9, **quiet, **options})
        trainer.fit(model)
        return trainer

    return run


class Terminate(Callback):
    """Sends SIGTERM to the process during step 5."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


class First(Callback):
    at: int | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.at = trainer.global_step if self.at is None else self.at


def test_sigterm_leaves_with_a_checkpoint_of_the_last_step(scenario, fit, model, tmp_path, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        fit(Terminate())
    assert ended.value.code == EXIT_CODE == 143
    assert scenario.link.events[-2:] == ["preempted", "close"]
    assert [entry.step for entry in CheckpointStore(str(tmp_path / "store" / "run")).entries("l0")] == [5]
    first, read = First(), list(model.seen)
    monkeypatch.setattr(checkpointer, "PROCESS", "the next one")
    scenario.made.clear()
    fit(first)
    assert first.at == 5
    assert len(set(model.seen[: 6 * 4])) == 24, "the epoch goes on with what was not read"
    assert model.seen[: len(read)] == read


@pytest.mark.parametrize("lands", [True, False], ids=["merged", "unmerged"])
def test_work_lost_by_a_preemption_is_reported(scenario, fit, caplog, lands):
    scenario.lands = lands
    with pytest.raises(SystemExit):
        fit(Terminate())
    assert ("pre-empted before all of this learner's work was merged" in caplog.text) != lands


def test_sigterm_during_validation_leaves_the_run(scenario, fit, model, tmp_path):
    validate = model.validation_step

    def terminated(batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(batch, batch_idx)

    model.validation_step = terminated
    with pytest.raises(SystemExit) as ended:
        fit(First(), limit_val_batches=1.0, num_sanity_val_steps=0, val_check_interval=3)
    assert ended.value.code == EXIT_CODE
    assert "preempted" in scenario.link.events
    assert [entry.step for entry in CheckpointStore(str(tmp_path / "store" / "run")).entries("l0")] == [3]


@pytest.mark.parametrize("lands", [True, False], ids=["merged", "unmerged"])
def test_sigterm_while_the_last_contributions_are_awaited_leaves_the_last_steps_to_the_next_process(
    scenario, fit, tmp_path, caplog, lands
):
    scenario.lands = scenario.is_last = lands
    scenario.while_draining = partial(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        fit(First(), every=5)
    assert ended.value.code == EXIT_CODE
    assert scenario.link.events[-2:] == ["finish", "close"], "the final anchor is not evaluated"
    assert [entry.step for entry in CheckpointStore(str(tmp_path / "store" / "run")).entries("l0")] == [5]
    when = "after" if lands else "before"
    assert f"at step 9, {when} all of this learner's work was merged. Its next process goes on" in caplog.text


def test_a_learner_without_checkpoints_leaves_the_run_after_sigterm(scenario, fit, tmp_path):
    with pytest.raises(SystemExit):
        fit(Terminate(), every=0)
    assert "preempted" in scenario.link.events
    assert not (tmp_path / "store").exists()


def test_a_fit_without_sigterm_leaves_no_guard(fit):
    ended: queue.Queue[int] = queue.Queue()
    preemption = Preemption(0.05, ended.put)
    preemption.close()
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.2)


def test_a_hanging_process_ends_after_the_grace_period():
    ended: queue.Queue[int] = queue.Queue()
    preemption = Preemption(0.05, ended.put)
    preemption.has_trained = True
    preemption.notice()
    preemption.close()  # the fit was left, but the process has not ended
    assert ended.get(timeout=WITHIN_S) == EXIT_CODE


@pytest.mark.seconds
def test_before_the_first_step_the_signal_ends_the_process_at_once(caplog):
    ended: queue.Queue[int] = queue.Queue()
    Preemption(600.0, ended.put).notice()
    assert ended.get(timeout=WITHIN_S) == EXIT_CODE
    assert "nothing to save" in caplog.text


def test_the_time_left_counts_from_the_first_signal():
    preemption = Preemption(60.0, lambda code: None)
    assert preemption.left_s == pytest.approx(60.0 - RESERVE_S, abs=0.1)
    preemption.notice()
    noticed_s = time.monotonic()
    while time.monotonic() == noticed_s:
        pass
    first_s = preemption.left_s
    preemption.notice()
    assert preemption.left_s <= first_s < 60.0 - RESERVE_S


def test_the_exit_code_causes_a_restart():
    assert EXIT_CODE == fleet._PREEMPTED_EXIT_CODE == 143
