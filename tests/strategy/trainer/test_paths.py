"""Two learners with one script write to different places."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_diloco import DecoupledDiLoCoStrategy
from lightning_diloco.storage import local_runs
from lightning_diloco.strategy.trainer.paths import checkpoint_url


def fit_as(learner, model, trainer_for, **options):
    trainer = trainer_for(
        strategy=DecoupledDiLoCoStrategy(learner=learner),
        max_steps=2,
        limit_val_batches=0,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(model)
    return trainer


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_default_paths_are_in_the_learners_directory(scenario, model, trainer_for, tmp_path):
    trainer = fit_as("ada", model, trainer_for, logger=True, enable_checkpointing=True)
    assert trainer.default_root_dir == str(tmp_path / "learners" / "ada")
    assert any("checkpoints" in name for name in files(tmp_path))
    assert all(name.startswith("learners/ada/lightning_logs/version_0/") for name in files(tmp_path))
    assert scenario.link.root_dir == tmp_path


def test_learners_share_no_file_with_explicit_paths(scenario, model, trainer_for, tmp_path):
    written = []
    for learner in ("ada", "bob"):
        before = files(tmp_path)
        keep = ModelCheckpoint(tmp_path / "kept", filename="last")
        logger = CSVLogger(tmp_path / "logs", version="one")
        fit_as(learner, model, trainer_for, logger=logger, enable_checkpointing=True, callbacks=keep)
        written.append(files(tmp_path) - before)
    assert written[0]
    assert {name.replace("ada", "bob") for name in written[0]} == written[1]
    assert "kept/learners/ada/last.ckpt" in written[0]


def test_run_dir_and_id_come_from_the_environment(scenario, model, trainer_for, tmp_path, monkeypatch):
    monkeypatch.setenv("DILOCO_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("DILOCO_LEARNER", "eve")
    assert fit_as(None, model, trainer_for).default_root_dir == str(tmp_path / "run" / "learners" / "eve")


def test_own_directory_set_by_a_launcher_is_not_changed(scenario, model, trainer_for, tmp_path, monkeypatch):
    own = tmp_path / "run" / "learners" / "l0"
    monkeypatch.setenv("DILOCO_LEARNER", "l0")
    monkeypatch.setenv("DILOCO_RUN_DIR", str(tmp_path / "elsewhere"))
    trainer = fit_as(None, model, trainer_for, default_root_dir=own, logger=True)
    assert trainer.default_root_dir == trainer.logger.save_dir == str(own)


def test_paths_below_the_working_directory_move_into_the_run(scenario, model, trainer_for, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("DILOCO_RUN_DIR", str(tmp_path / "run"))
    keep = ModelCheckpoint("kept", filename="last")
    logger = CSVLogger("runs/tiny", version="one")
    elsewhere = CSVLogger("../elsewhere", version="one")
    trainer = fit_as(
        "eve", model, trainer_for, logger=[logger, elsewhere], enable_checkpointing=True, callbacks=keep,
        default_root_dir="runs",
    )  # fmt: skip
    own = tmp_path / "run" / "learners" / "eve"
    assert trainer.default_root_dir == str(own)
    assert files(here) == set()
    assert {"kept/last.ckpt", "runs/tiny/lightning_logs/one/metrics.csv"} <= files(own)
    assert (tmp_path / "elsewhere/learners/eve/lightning_logs/one/metrics.csv").is_file()


def test_last_checkpoint_is_that_of_the_learner(scenario, model, trainer_for, tmp_path):

    def fit(learner, max_steps):
        keep = ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=1)
        strategy = DecoupledDiLoCoStrategy(learner=learner)
        trainer = trainer_for(
            strategy=strategy, max_steps=max_steps, limit_val_batches=0, enable_checkpointing=True, callbacks=keep
        )
        started = len(scenario.made)
        trainer.fit(model, ckpt_path="last")
        return len(scenario.made[started].steps)

    with pytest.warns(UserWarning, match="there is no last checkpoint"):
        assert fit("ada", 2) == 2
    with pytest.warns(UserWarning, match="there is no last checkpoint"):
        assert fit("bob", 3) == 3
    assert fit("ada", 3) == 1


def test_without_an_id_no_path_is_changed(scenario, model, trainer_for, tmp_path):
    assert fit_as(None, model, trainer_for).default_root_dir == str(tmp_path)


def test_validate_changes_no_path(scenario, model, trainer_for, tmp_path):
    trainer = trainer_for(strategy=DecoupledDiLoCoStrategy(learner="ada"))
    trainer.validate(model, verbose=False)
    assert trainer.default_root_dir == str(tmp_path)


@pytest.fixture
def fit_in(model, trainer_for, monkeypatch):
    """Fits in a working directory."""

    def fit(folder, **options):
        monkeypatch.chdir(folder)
        trainer_for(max_steps=1, limit_val_batches=0, **options).fit(model)

    return fit


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({"default_root_dir": "memory://bucket/root", "enable_checkpointing": True}, None),  # not a folder of this name
        ({"default_root_dir": None}, None),  # no file is wanted
        ({"default_root_dir": None, "logger": True}, "."),
        ({"default_root_dir": None, "enable_checkpointing": True}, "."),
        ({"default_root_dir": "given"}, "given"),
    ],
    ids=str,
)
def test_a_run_that_a_learner_begins_is_in_a_permanent_folder_only_if_files_are_wanted(
    scenario, fit_in, tmp_path, options, folder
):
    fit_in(tmp_path, **options)
    assert scenario.link.root_dir == (None if folder is None else tmp_path if folder == "." else Path(folder))
    if folder is None:
        assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_learners_may_be_in_a_bucket(tmp_path, monkeypatch):
    monkeypatch.delenv("DILOCO_RUN_DIR", raising=False)
    assert checkpoint_url(None, None, "s3://bucket/root", "run") == "s3://bucket/root/diloco-checkpoints/run"
    assert checkpoint_url(None, None, str(tmp_path), "run") == str(tmp_path / "diloco-checkpoints" / "run")
    (tmp_path / "run").mkdir()
    assert checkpoint_url(None, tmp_path / "run", "s3://bucket/root", "run") == str(tmp_path / "run" / "checkpoints")


def test_a_learner_that_joins_manually_shares_checkpoints_with_others_on_its_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("DILOCO_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "there").mkdir()
    local_runs.note("run", tmp_path / "there")
    assert checkpoint_url(None, None, str(tmp_path), "run") == str(tmp_path / "there" / "checkpoints")
    local_runs.note("run", tmp_path / "removed")
    assert checkpoint_url(None, None, str(tmp_path), "run") == str(tmp_path / "diloco-checkpoints" / "run")
