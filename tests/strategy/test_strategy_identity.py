"""A learner that joins without a name gets a name that no other process of this machine has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_diloco.config import LearnerConfig, is_learner_id
from lightning_diloco.errors import ConfigError, JoinError
from lightning_diloco.learner import name as naming
from lightning_diloco.strategy.identity import learner_id

JOIN = "diloco://127.0.0.1:1/{run}#secret," + "0" * 64


@pytest.fixture(autouse=True)
def _slots(tmp_path, monkeypatch):
    monkeypatch.setattr(naming, "_held", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("DILOCO_LEARNER", "DILOCO_JOIN"):
        monkeypatch.delenv(name, raising=False)


def test_option_precedes_environment_which_precedes_slot(monkeypatch):
    monkeypatch.setenv("DILOCO_LEARNER", "eve")
    assert learner_id(LearnerConfig(learner="ada", join=JOIN.format(run="a"))) == "ada"
    assert learner_id(LearnerConfig(join=JOIN.format(run="a"))) == "eve"


def test_a_learner_that_starts_its_own_run_has_no_id_yet():
    assert learner_id(LearnerConfig()) is None


@pytest.mark.seconds
@pytest.mark.parametrize(("hosts", "num_nodes"), [("2", 1), ("1", 2)])
def test_a_script_with_another_number_of_hosts_ends_with_code_2(tmp_path, monkeypatch, hosts, num_nodes):
    monkeypatch.setenv("DILOCO_NUM_HOSTS", hosts)
    code = (
        "import lightning as L, lightning_diloco\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        f"options = dict(accelerator='cpu', devices=1, num_nodes={num_nodes}, max_steps=1, logger=False)\n"
        "L.Trainer(strategy='decoupled_diloco', **options).fit(BoringModel())"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"Trainer(num_nodes={num_nodes}) in a learner of {hosts} host(s)" in ended.stderr
    assert f"pass Trainer(num_nodes={hosts})" in ended.stderr


def test_an_empty_join_string_does_not_start_a_new_run(monkeypatch):
    monkeypatch.setenv("DILOCO_JOIN", "")
    with pytest.raises(ConfigError, match="is empty"):
        learner_id(LearnerConfig())


def test_slot_is_kept_within_a_process_and_counted_per_run(monkeypatch):
    monkeypatch.setattr(naming.socket, "gethostname", lambda: "_höst 1.example.org")
    monkeypatch.setenv("DILOCO_JOIN", JOIN.format(run="a"))
    assert learner_id(LearnerConfig()) == learner_id(LearnerConfig()) == "h-st-1-0"
    assert learner_id(LearnerConfig(join=JOIN.format(run="b"))) == "h-st-1-0"
    assert is_learner_id("h-st-1-0")


def test_processes_get_different_slots_and_a_free_one_is_taken_again(tmp_path):
    code = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from lightning_diloco.learner.name import own_name; print(own_name('r'), flush=True); input()"
    )

    def start():
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    names = []
    with start() as first:
        names.append(first.stdout.readline().strip())
        with start() as second:
            names.append(second.stdout.readline().strip())
            first.communicate("\n")
            with start() as third:
                names.append(third.stdout.readline().strip())
                third.communicate("\n")
            second.communicate("\n")
    assert [name.rpartition("-")[2] for name in names] == ["0", "1", "0"]


def test_wrong_join_string_is_reported_before_any_path_is_changed(scenario, model, trainer_for, monkeypatch):
    monkeypatch.setenv("DILOCO_JOIN", "nonsense")
    trainer = trainer_for()
    with pytest.raises(ConfigError, match="diloco://"):
        trainer.fit(model)
    assert scenario.made == []


def test_a_second_fit_in_a_run_that_others_have_started_is_refused(scenario, model, trainer_for, monkeypatch):
    monkeypatch.setenv("DILOCO_JOIN", JOIN.format(run="a"))
    trainer_for().fit(model)
    trainer_for().validate(model, verbose=False)
    again = trainer_for()
    with pytest.raises(JoinError, match="already trained in run a"):
        again.fit(model)
    assert len(scenario.made) == 1
    monkeypatch.setenv("DILOCO_JOIN", JOIN.format(run="b"))
    trainer_for().fit(model)
    assert len(scenario.made) == 2


def test_after_a_fit_that_failed_another_one_may_begin(scenario, model, trainer_for, monkeypatch):
    monkeypatch.setenv("DILOCO_JOIN", JOIN.format(run="a"))
    scenario.step_error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer_for().fit(model)
    scenario.step_error = None
    trainer_for().fit(model)
    assert [link.events[-1] for link in scenario.made] == ["close", "close"]


def test_the_end_of_training_is_marked_in_the_run_directory(scenario, model, trainer_for, monkeypatch, tmp_path):
    (folder := tmp_path / "learners" / "l0").mkdir(parents=True)
    monkeypatch.setenv("DILOCO_RUN_DIR", str(tmp_path))
    scenario.step_error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        trainer_for().fit(model)
    assert not (folder / "finished").exists()
    scenario.step_error = None
    trainer_for().fit(model)
    assert (folder / "finished").exists()
