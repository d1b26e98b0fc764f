"""A script with its own loggers (TensorBoard, W&B and CSV) trains with the strategy and without it.

The test reads their files. With the strategy, each logger has the same metrics at the same steps as without it, in a
folder of each learner, and additionally the metrics of the strategy.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tracking.offline import read
from tests.tracking.tensorboard import Series, scalars

ROOT = Path(__file__).parents[2]
NUM_STEPS = 12
SCRIPT = f"""
import sys
import lightning as L, torch
import lightning_diloco
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tests.strategy.conftest import TinyModel

torch.manual_seed(7)
loggers = [TensorBoardLogger("boards"), CSVLogger("tables"), WandbLogger(project="theirs", offline=True)]
trainer = L.Trainer(strategy=sys.argv[1], accelerator="cpu", devices=1, max_steps={NUM_STEPS}, log_every_n_steps=2,
                    val_check_interval=6, check_val_every_n_epoch=None, limit_val_batches=1, num_sanity_val_steps=0,
                    logger=loggers, enable_checkpointing=False, enable_model_summary=False)
trainer.fit(TinyModel())
assert trainer.loggers == loggers
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the script ran alone, in `plain`, and as two learners of a run, in `run`."""
    here = tmp_path_factory.mktemp("loggers")
    (here / "train.py").write_text(SCRIPT)
    (here / "plain").mkdir()
    (here / "home").mkdir()
    _call(here / "plain", sys.executable, "../train.py", "auto")
    words = ("run", "train.py", "--local", "2", "--run-dir", "run", "--no-page", "--", "decoupled_diloco")
    _call(here, sys.executable, "-m", "lightning_diloco.cli.main", *words)
    return here


def _call(cwd: Path, *argv: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "WANDB_"))}
    given = {**own, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "HOME": str(cwd / "home")}
    done = subprocess.run(argv, cwd=cwd, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def steps_of(series: Series) -> dict[str, list[int]]:
    """Return the script's own metrics, and the steps at which each has a value."""
    return {tag: [step for step, _ in points] for tag, points in series.items() if tag in ("train_loss", "val_loss")}


def board(folder: Path) -> Series:
    (path,) = folder.rglob("events.out.tfevents.*")
    return scalars(path)


def table(folder: Path) -> Series:
    (path,) = (path for path in folder.rglob("metrics.csv") if "tables" in path.parts)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    names = [name for name in rows[0] if name not in ("step", "epoch")]
    return {name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("written", [board, table])
@pytest.mark.parametrize("learner", ["l0", "l1"])
def test_a_file_logger_has_the_same_metrics_with_the_strategy(folder: Path, written, learner: str) -> None:
    plain, found = written(folder / "plain"), written(folder / "run" / "learners" / learner)
    assert steps_of(plain).keys() == {"train_loss", "val_loss"}
    assert len(plain["train_loss"]) == NUM_STEPS // 2
    assert all(steps_of(found)[name][: len(steps)] == steps for name, steps in steps_of(plain).items())
    assert all(0.0 < value < 10.0 for name in ("train_loss", "val_loss") for _, value in found[name])
    assert "diloco/staleness_versions" in found
    assert not any(name.startswith("diloco/") for name in plain)


@pytest.mark.slow
def test_tensorboard_and_csv_agree(folder: Path) -> None:
    for learner in ("l0", "l1"):
        own = folder / "run" / "learners" / learner
        drawn = board(own)
        for name, points in table(own).items():
            assert dict(drawn[name]) == pytest.approx(dict(points), rel=1e-5), name


@pytest.mark.slow
def test_wandb_has_the_same_metrics_with_the_strategy(folder: Path) -> None:
    (plain,) = read(folder / "plain")
    learners = read(folder / "wandb")  # folders are named by run
    assert [run.project for run in (plain, *learners)] == ["theirs"] * 3
    for run in learners:
        assert {"train_loss", "val_loss", "diloco/staleness_versions"} <= run.keys
        for name in ("train_loss", "val_loss"):
            wanted = [row["trainer/global_step"] for row in plain.rows if name in row]
            found = [row["trainer/global_step"] for row in run.rows if name in row]
            assert found[: len(wanted)] == wanted


@pytest.mark.slow
def test_file_loggers_write_only_into_the_learners_folders(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"train.py", "plain", "home", "run", "wandb"}
