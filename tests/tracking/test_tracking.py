"""The real W&B, offline; the tests read its files."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_diloco.errors import ConfigError
from lightning_diloco.tracking import Wandb
from lightning_diloco.tracking.syncer import Rows, tracked
from tests.plots.conftest import commit, event
from tests.tracking.offline import read

PROGRESS = {
    "fleet_tokens": 200.0, "goodput": 0.5, "participation": 1.0, "bytes_up": 3, "bytes_down": 4,
    "ledger": {"seen": 400, "merged": 300, "pending": 90, "discarded": {"lapsed": 10}},
    "learners": [
        {"phase": "stepping", "tokens_per_s": 10.0, "staleness_versions": 1, "loss": 2.0, "eval_loss": 3.0},
        {"phase": "stepping", "tokens_per_s": 30.0, "staleness_versions": 0, "loss": 4.0, "eval_loss": None},
        {"phase": "lapsed", "tokens_per_s": 50.0, "staleness_versions": 9, "loss": 9.0, "eval_loss": None},
    ],
}  # fmt: skip
OUTER = {"lr": 0.58, "merged_norm": 2.0, "norms": [1.0, 3.0], "cosines": [0.5, 0.75]}


@pytest.fixture
def telling(scenario: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a link with the values of a real one."""
    told = {"fleet_tokens": 640.0, "diloco/staleness_versions": 1.0, "fleet/learners": 2.0, "perf/tokens_per_s": 1000.0}
    link = sys.modules["lightning_diloco.learner.member"].Member
    monkeypatch.setattr(link, "metrics", lambda self: {**told, "fleet_tokens": 64.0 * len(self.steps)})
    scenario.is_last = True
    return scenario


@pytest.fixture
def fit(telling: Any, model: Any, trainer_for: Callable[..., Any]) -> Callable[..., None]:
    """Fits three steps with the callback, which does not change the Trainer's loggers and W&B."""

    def fit_once(logger: Any = False) -> None:
        options = {"log_every_n_steps": 1, "max_steps": 3, "val_check_interval": 3, "num_sanity_val_steps": 0}
        trainer = trainer_for(callbacks=Wandb("mine"), logger=logger, **options)
        before, open_run = trainer.loggers, wandb.run
        trainer.fit(model)
        assert trainer.loggers == before
        assert logger or wandb.run is open_run is None

    return fit_once


@pytest.mark.slow
def test_a_learner_logs_over_fleet_tokens_and_continues_under_the_same_id(
    fit: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        fit()
    first, again = read(tmp_path)
    for run in (first, again):
        assert (run.id, run.name, run.group) == ("run-l0", "l0", "run")
        assert (run.project, run.job_type, run.exit_code) == ("mine", "learner", 0)
        assert run.axes["*"] == "fleet_tokens"
    assert {"train/loss", "eval/loss", "diloco/staleness_versions", "fleet/learners", "perf/tflops"} <= first.keys
    assert "val_loss" not in first.keys
    losses = [(row["fleet_tokens"], row["train/loss"]) for row in first.rows if "train/loss" in row]
    assert [tokens for tokens, _ in losses] == [64.0, 128.0, 192.0]
    assert "found no login" in caplog.text
    assert "wandb sync --append" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["logger", "run"])
def test_a_users_own_run_stays_the_only_one(
    fit: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    opened: list[Any] = []
    real = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: opened.append(real(**options)) or opened[-1])
    loggers: list[Any] = [CSVLogger(tmp_path)]
    if whose == "logger":
        loggers.append(WandbLogger(project="theirs", save_dir=tmp_path, offline=True))
        monkeypatch.setenv("WANDB_MODE", "offline")
    else:
        wandb.init(project="theirs", dir=tmp_path, mode="offline")
    fit(logger=loggers)
    wandb.finish()
    (run,) = read(tmp_path)
    assert (run.project, len(opened)) == ("theirs", 1)
    assert ("diloco/staleness_versions" in run.keys) == (whose == "logger")
    assert "diloco/staleness_versions" in next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]


@pytest.mark.slow
def test_the_syncers_run_has_all_events_of_the_tape_from_its_start(tmp_path: Path) -> None:
    tape = tmp_path / "tape" / "events.jsonl"
    tape.parent.mkdir()
    now = time.time()
    before = {**event(0, "evaluated", eval_loss=9.0, reason=None), "t": now - 60}
    tape.write_text(json.dumps(before) + "\n")
    with tracked(tmp_path, "mine"):
        lines = [event(0, "progress", **PROGRESS), event(0, "outer", **OUTER), commit(0, 0, 1, "l0", "l1")]
        lines.append(event(0, "evaluated", eval_loss=2.5, reason=None))
        with tape.open("a") as file:
            file.writelines(json.dumps({**line, "t": now + 60}) + "\n" for line in lines)
        (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "goodput": 0.5}))
        (tmp_path / "join").write_text("diloco://127.0.0.1:1/toy-run#secret," + "0" * 64)
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.rglob("*.wandb")) and time.monotonic() < deadline_s:
            time.sleep(0.05)
    (run,) = read(tmp_path)
    assert (run.id, run.group, run.job_type) == ("toy-run-syncer", "toy-run", "syncer")
    assert {row["fleet_tokens"] for row in run.rows} == {200.0}
    assert [row["eval/final_loss"] for row in run.rows if "eval/final_loss" in row] == [2.5]
    assert {"fleet/goodput", "fleet/quorum_s", "fleet/round_s", "outer/cosine", "outer/gradient_norm"} <= run.keys
    assert (run.summary["status"], run.exit_code) == ("finished", 0)
    assert "secret" not in str(run)


def test_rows_of_the_fleet_count_present_learners() -> None:
    (row,) = Rows().of([event(0, "progress", **PROGRESS)])
    assert (row["fleet/learners"], row["fleet/tokens_per_s"]) == (2, 40.0)
    assert (row["train/loss"], row["eval/loss"]) == (3.0, 3.0)
    assert [row[f"fleet/ledger_{fate}"] for fate in ("seen", "merged", "pending", "discarded")] == [400, 300, 90, 10]


def test_rows_of_rounds_split_the_wait_into_quorum_and_grace() -> None:
    rows = list(
        Rows().of([commit(0, 0, 1, "l0", "l1"), event(0, "outer", **OUTER), event(0, "join"), event(1, "join")])
    )
    assert rows[0]["fleet/quorum_s"] == 0.1
    assert rows[0]["fleet/grace_s"] == pytest.approx(0.1)
    assert [rows[1][f"outer/{name}"] for name in ("lr", "cosine", "smallest_cosine")] == [0.58, 0.625, 0.5]
    assert rows[2:] == [{"fleet/num_joins": 1}, {"fleet/num_joins": 2}]


def test_only_the_first_process_of_a_learner_opens_a_run(model: Any) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=False)  # whose strategy is not used
    Wandb("mine").on_train_start(trainer, model)
    assert wandb.run is None


def test_the_callback_is_refused_without_the_strategy(model: Any, trainer_for: Any) -> None:
    with pytest.raises(ConfigError, match="callback Wandb with strategy SingleDeviceStrategy"):
        trainer_for(strategy="auto", callbacks=Wandb("mine")).fit(model)
