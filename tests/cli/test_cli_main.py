"""The command line of `diloco`: parsing, output and exit codes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_diloco import __version__
from lightning_diloco.cli import recipes
from lightning_diloco.cli.local import run as local_run
from lightning_diloco.cli.local.display import Screen
from lightning_diloco.cli.local.interruption import Interruption
from lightning_diloco.cli.local.run import Ended, Plan
from lightning_diloco.cli.main import main
from lightning_diloco.cli.run import split
from lightning_diloco.cli.text.spelling import SECTIONS, TRAINER
from lightning_diloco.config import RunConfig
from lightning_diloco.errors import ConfigError, StorageError, TransportError
from lightning_diloco.syncer.replay import Replayed

ROOT = Path(__file__).parents[2]
VERBS = ("run", "syncer", "status", "ls", "cp")
JOIN = "diloco://127.0.0.1:7654/run#secret," + "0" * 64


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two recipes and a script."""
    family = tmp_path / "recipes" / "toy"
    family.mkdir(parents=True)
    (family / "one.yaml").write_text("# The first of two.\nmodel:\n  class_path: some.where.Net\n")
    (family / "two.yaml").write_text("model: Net2\n")
    (family / "own.py").write_text('"""A script."""\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "roots", lambda: (tmp_path / "recipes",))
    return tmp_path


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that would have been executed."""
    planned: list[Plan] = []

    def execute(plan: Plan, screen: Screen, interruption: Interruption) -> Ended:
        planned.append(plan)
        return Ended(exit_code=0, summary=None)

    monkeypatch.setattr(local_run, "execute", execute)
    return planned


@pytest.mark.parametrize(
    ("line", "ours", "passed_on"),
    [
        ("r.yaml --local 2", "r.yaml --local 2", ""),
        ("r.yaml --local 2 --trainer.max_steps 60", "r.yaml --local 2", "--trainer.max_steps 60"),
        ("--local=2 r.yaml --no-table --lr=1 --threads 3", "--local=2 r.yaml --no-table", "--lr=1 --threads 3"),
        ("r.yaml --local 2 -- --threads 3", "r.yaml --local 2", "--threads 3"),
        ("s.py --local 2 data.txt --local 3", "s.py --local 2", "data.txt --local 3"),
        ("s.py --local 2 -- -- x", "s.py --local 2", "-- x"),
        ("--typo r.yaml x", "--typo r.yaml", "x"),
        ("r.yaml --local", "r.yaml --local", ""),
        ("--help", "--help", ""),
    ],
)
def test_a_command_line_is_split_at_the_end_of_the_options_of_diloco(line: str, ours: str, passed_on: str) -> None:
    assert split(["run", *line.split()]) == (["run", *ours.split()], passed_on.split())


def test_run_starts_recipes_with_lightning_cli(project: Path, plans: list[Plan]) -> None:
    line = "run toy/one --local 3 --run-dir there --max-restarts 1 --threads 2 --stop-grace 9 --shards 2"
    assert main([*line.split(), "--trainer.max_steps", "60"]) == 0
    (plan,) = plans
    assert plan.learner_argv == (
        *(sys.executable, "-m", "lightning_diloco.cli.fit", "--local", "3", str(project / "recipes/toy/one.yaml")),
        *("--trainer.max_steps", "60"),
    )
    assert plan.syncer_argv == (
        *(sys.executable, "-m", "lightning_diloco.cli.main", "syncer", "--run-dir", str(project / "there")),
        *("--expect", "3", "--data-parts", "3", "--shards", "2"),
    )
    assert (plan.num_learners, plan.max_restarts, plan.threads, plan.grace_s) == (3, 1, 2, 9.0)
    assert (project / "there").is_dir()


def test_run_starts_scripts_with_python(project: Path, plans: list[Plan]) -> None:
    assert main(["run", "recipes/toy/own.py", "--local", "1", "--", "--threads", "9"]) == 0
    assert plans[0].learner_argv == (sys.executable, "recipes/toy/own.py", "--threads", "9")
    assert plans[0].threads is None


@pytest.mark.seconds
def test_run_directories_are_never_shared_by_default(project: Path, plans: list[Plan]) -> None:
    for _ in range(3):
        main(["run", "toy/one", "--local", "1"])
    names = [plan.run_dir.name for plan in plans]
    assert len(set(names)) == 3
    assert all(name.startswith("one-") and plan.run_dir.is_dir() for name, plan in zip(names, plans, strict=True))


def test_a_finished_run_is_not_trained_again(
    project: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = project / "there"
    run_dir.mkdir()
    (run_dir / "join").touch()
    for status, code in (("interrupted", 0), ("finished", 2)):
        (run_dir / "summary.json").write_text(json.dumps({"status": status}))
        assert main(["run", "toy/one", "--local", "1", "--run-dir", "there"]) == code
    said = " ".join(capsys.readouterr().err.split())
    assert "there has finished" in said
    assert "To train anew, choose another --run-dir" in said
    assert len(plans) == 1


def test_run_reports_all_problems_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "run",
                "toy/one",
                "--max-restarts",
                "-1",
                "--threads",
                "0",
                "--stop-grace",
                "0",
                "--trainer.x",
                "1",
                "--local",
                "2",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert "--local N is missing: pass the number of learners; put it before the options that are passed on" in said
    assert "--max-restarts -1: must be at least 0" in said
    assert "--threads 0: must be at least 1" in said
    assert "--stop-grace 0: must be above 0" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rnu toy/one", "no verb 'rnu' (did you mean run?)"),
        ("ls --hlep", "ls takes no --hlep (did you mean --help?)"),
        ("run --locl 2 toy/one", "run takes no --locl (did you mean --local?)"),
        ("run toy/one --locl 2", "--locl: unknown; options of a recipe look like"),
        ("run toy/one --local 2 --run_dir x", "did you mean --run-dir?"),
        ("run toy/one --local 2 --trainer.max_steps 2 --no-page", "--no-page: must come before the options that are"),
        ("run toy/one --local 2 --grace 9", "did you mean --stop-grace or --trainer.strategy.grace?"),
        ("run toy/one --local 2 -- --sync-every 9", "did you mean --trainer.strategy.sync_every?"),
        ("run toy/one --local 2 --max-steps 60", "did you mean --trainer.max_steps?"),
        ("run toy/one --local 2 --devices=2", "did you mean --trainer.devices?"),
        ("run toy/one --local 2 --max_epoch 3", "did you mean --trainer.max_epochs?"),
        ("run toy/one --local 2 --trainer.max_stepz 3", "Trainer has no max_stepz; did you mean --trainer.max_steps?"),
        ("run recipes/toy/own.py --local 2 --run_dir=x", "--run_dir would be passed on to recipes/toy/own.py; write"),
        ("chaos toy/one --local 2 --fault-per-hour 6", "did you mean --faults-per-hour?"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest_name_before_anything_starts(
    project: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(line.split()))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not plans
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("line", "passed_on"),
    [
        ("run toy/one --local 2 --trainer.callbacks+=a.B --model.x -1", "--trainer.callbacks+=a.B --model.x -1"),
        ("run toy/one --local 2 --data=c.D --seed_everything 3", "--data=c.D --seed_everything 3"),
        ("run recipes/toy/own.py --local 2 --epochs 3 --learning_rate 1", "--epochs 3 --learning_rate 1"),
        ("run recipes/toy/own.py --local 2 -- --run_dir x", "--run_dir x"),
    ],
)
def test_options_of_recipes_and_scripts_are_passed_on(
    project: Path, plans: list[Plan], line: str, passed_on: str
) -> None:
    assert main(line.split()) == 0
    assert " ".join(plans[0].learner_argv).endswith(f" {passed_on}")


def test_arguments_of_the_trainer_are_those_of_lightning() -> None:
    from lightning.pytorch import Trainer

    assert set(inspect.signature(Trainer).parameters) == set(TRAINER)


def test_sections_of_a_recipe_are_those_of_lightning_cli(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_diloco.hf.recipe import RecipeCLI

    taken: set[str] = set()

    class Taken(RecipeCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            fit = parser._subcommands_action.choices["fit"]
            taken.update(option[2:].partition(".")[0] for option in fit._option_string_actions if option[1] == "-")
            raise InterruptedError

    monkeypatch.setattr(sys, "argv", ["diloco"])
    with pytest.raises(InterruptedError):
        Taken(project, args=["fit"])
    assert taken == set(SECTIONS)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"lightning-diloco {__version__}\n")


def test_a_closed_output_pipe_ends_the_command_quietly(project: Path) -> None:
    code = "import sys; from lightning_diloco.cli.main import main; sys.exit(main(['ls']))"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_run_directory_that_cannot_be_created_is_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "file").touch()
    assert main(["run", "toy/one", "--local", "1", "--run-dir", "file/there"]) == 2
    assert "file/there: is a file, or inside one" in capsys.readouterr().err


def test_the_error_for_a_missing_recipe_names_the_searched_places_and_the_nearest_name(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "recipes/toy/oen.yaml", "--local", "1"]) == 2
    said = capsys.readouterr().err
    assert str(project / "recipes/toy/oen.yaml") in said
    assert "the nearest: toy/one" in said
    assert "`diloco ls`" in said
    assert "Traceback" not in said


def test_a_file_of_another_kind_is_not_a_recipe(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "notes.txt").touch()
    assert main(["run", "notes.txt", "--local", "1"]) == 2
    assert "notes.txt: a recipe ends in .yaml, .yml, .py" in capsys.readouterr().err


def test_ls_shows_name_model_and_description(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "toy/one     Net     The first of two.",
        "toy/own.py  script  A script.",
        "toy/two     Net2",
    ]


def test_a_broken_recipe_does_not_hide_the_others(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "recipes/toy/bad.yaml").write_text("a: [")
    (project / "recipes/toy/bad.py").write_text("def")
    assert main(["ls"]) == 0
    said = capsys.readouterr().out
    assert "not valid YAML" in said
    assert "not valid Python" in said
    assert "toy/one" in said


def test_the_shipped_recipes_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tiny/gpt" in [recipe.name for recipe in recipes.find()]


def test_cp_copies_a_recipe(project: Path) -> None:
    assert main(["cp", "toy/one", "new/mine.yaml"]) == 0
    assert (project / "new/mine.yaml").read_bytes() == (project / "recipes/toy/one.yaml").read_bytes()
    assert main(["cp", "toy/two", "new"]) == 0
    assert (project / "new/two.yaml").exists()
    assert main(["cp", "toy/two", "newer/sub/"]) == 0
    assert (project / "newer/sub/two.yaml").exists()


def test_cp_refuses_a_target_with_another_suffix(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "toy/one", "new/mine"]) == 2
    assert "new/mine: must end in .yaml" in capsys.readouterr().err
    assert not (project / "new").exists()


@pytest.mark.parametrize(
    ("num_outer_steps", "said"),
    [
        (7, ": 7 outer steps from the log\n"),
        (3, ": 3 of 7 outer steps from the log; the earlier ones are in a snapshot\n"),
    ],
)
def test_replay_says_how_many_steps_the_log_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_outer_steps: int, said: str
) -> None:
    found = Replayed("outer steps", 0, num_outer_steps, 1, (3, 4), 9, True)
    monkeypatch.setattr("lightning_diloco.syncer.replay.replay", lambda run_dir: found)
    assert main(["replay", "run"]) == 0
    assert said in capsys.readouterr().out


def test_a_syncer_that_expects_no_learner_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["syncer", "--run-dir", str(tmp_path / "run"), "--expect", "0"]) == 2
    assert "--expect 0: must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_cp_copies_a_module_that_the_recipe_names(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "recipes/toy/net.py").write_text("class Net: ...")
    (project / "recipes/toy/one.yaml").write_text("model: {class_path: net.Net}")
    assert main(["ls"]) == 0
    assert "net.py" not in capsys.readouterr().out
    assert main(["cp", "toy/one", "new/mine.yaml"]) == 0
    assert (project / "new/net.py").read_text() == "class Net: ..."
    (project / "new/mine.yaml").unlink()
    assert main(["cp", "toy/one", "new/mine.yaml"]) == 2
    assert "net.py already exists" in capsys.readouterr().err
    assert not (project / "new/mine.yaml").exists()


def test_cp_overwrites_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.yaml").write_text("precious")
    assert main(["cp", "toy/one", "mine.yaml"]) == 2
    assert "mine.yaml already exists" in capsys.readouterr().err
    assert (project / "mine.yaml").read_text() == "precious"


class _Syncer:
    """Replaces syncer/process.py."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: int | Exception = 0) -> None:
        self.options: dict[str, Any] = {}
        self._answer = answer
        module = ModuleType("lightning_diloco.syncer.process")
        module.SyncerOptions = dict  # type: ignore[attr-defined]
        module.serve = self.serve  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def serve(self, options: dict[str, Any]) -> int:
        self.options = options
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_syncer_passes_on_explicit_options_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = _Syncer(monkeypatch, 7)
    line = (
        f"syncer --run-dir {tmp_path} --expect 2 --data-parts 2 --grace adaptive --outer-lr 0.5 --record contributions"
    )
    assert main(line.split()) == 7
    assert served.options == {
        "run_dir": tmp_path,
        "listen": "127.0.0.1:0",
        "expect": 2,
        "embedded_by": None,
        "run_options": {"data_parts": 2, "grace": "adaptive", "outer_lr": 0.5},
        "reseed": False,
        "record_contributions": True,
        "standby_of": None,
        "takes_over": False,
        "num_shards": None,
        "shards_elsewhere": False,
    }


def test_syncer_offers_every_run_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = _Syncer(monkeypatch)
    defaults = {name: value for name, value in RunConfig().to_dict().items() if value is not None}
    flags = [word for name, value in defaults.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["syncer", "--run-dir", str(tmp_path), *flags]) == 0
    assert served.options["run_options"] == defaults


def test_a_restarted_syncer_listens_at_the_same_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = _Syncer(monkeypatch)
    (tmp_path / "join").write_text(JOIN)
    main(["syncer", "--run-dir", str(tmp_path), "--embedded-by", "1"])
    assert served.options["listen"] == "127.0.0.1:7654"
    assert served.options["embedded_by"] == 1
    main(["syncer", "--run-dir", str(tmp_path), "--listen", "127.0.0.1:0"])
    assert served.options["listen"] == "127.0.0.1:0"


@pytest.mark.parametrize("line", ["cp toy/one afile/x.yaml", "launch toy/own.py --engine ssh --learners 2 --to afile"])
def test_a_file_instead_of_a_folder_is_named_without_a_traceback(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.setattr(recipes, "roots", lambda: (project / "recipes", ROOT / "recipes"))
    (project / "afile").touch()
    assert main([word.replace("toy/own.py", "recipes/toy/own.py") for word in line.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("diloco: afile: is a file, or inside one, and must be a folder; choose another path")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--page 127.0.0.1", "must be host:port"),
        ("--page 192.0.2.1:0", "the page cannot be served there"),
        ("--from nowhere", "nowhere has no snapshot.json"),
    ],
)
def test_a_refused_run_leaves_no_folder(
    project: Path, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    assert main([*["run", "toy/one", "--local", "2"], *option.split()]) == 2
    assert said in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_a_run_directory_that_is_a_file_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "afile").touch()
    assert main(["run", "toy/one", "--local", "2", "--run-dir", "afile"]) == 2
    assert "run directory afile: is a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(ConfigError(["one", "two"]), 2), (TransportError("gone"), 2), (StorageError("disk full"), 1)],
)
def test_errors_are_printed_as_one_block(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    exit_code: int,
) -> None:
    _Syncer(monkeypatch, error)
    assert main(["syncer", "--run-dir", str(tmp_path)]) == exit_code
    assert capsys.readouterr().err == f"diloco: {error}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_ends_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"  diloco {verb}" in capsys.readouterr().out.partition("\nexample")[2]


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from lightning_diloco.cli.main import main
try:
    main([])
except SystemExit:
    pass
print(sorted({"torch", "lightning", "pyarrow", "rich", "transformers"} & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "usage: diloco" in said
    assert said.splitlines()[-1] == "[]"
