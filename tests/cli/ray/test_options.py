"""All problems of the command line are reported at once, before Ray is used."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_diloco.cli.local.run import Ended, Plan
from lightning_diloco.cli.main import build_parser, main
from lightning_diloco.cli.ray import files
from lightning_diloco.cli.ray.options import layout, needs
from lightning_diloco.cli.run import split
from lightning_diloco.errors import ConfigError


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--engine ray --learners 2 --local 2", "--local 2 together with --engine ray"),
        ("--engine ray", "--learners N is missing"),
        ("--engine ray --learners 0", "--learners 0: must be at least 1"),
        ("--engine ray --learners 1 --resources-per-learner GPU", "must be a JSON object of names and amounts"),
        ('--engine ray --learners 1 --resources-per-learner {"GPU":0}', "must be a JSON object of names and amounts"),
        ("--engine ray --learners 1 --address ray://10.0.0.1:10001", "must be HOST:PORT of a Ray head"),
        ("--engine ray --learners 1 --run-dir s3://bucket/run", "must be a path that all nodes mount"),
        ("--local 1 --learners 2 --address here:1", "--learners, --address: only with --engine ray"),
        ("--engine ray --learners 1 --threads 0", "--threads 0: must be at least 1"),
        ("--engine ray --learners 1 --hosts-per-learner 0", "--hosts-per-learner 0: must be at least 1"),
        ("--local 1 --hosts-per-learner 2", "--hosts-per-learner: only with --engine ray"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_created(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train.py", *line.split()]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    assert main(["run", "train.py", "--engine", "ray", "--learners", "1"]) == 2
    assert "pip install 'lightning-diloco[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, {"CPU": 1}), ('{"GPU": 8}', {"CPU": 1, "GPU": 8}), ('{"CPU": 4.5}', {"CPU": 4.5})],
)
def test_a_learner_needs_at_least_one_core(text: str | None, found: dict[str, float]) -> None:
    assert needs(text) == found


def test_several_hosts_need_a_cluster_of_several_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--engine", "ray", "--learners", "1", "--hosts-per-learner", "2", "--run-dir", str(tmp_path / "run"))
    assert main(["run", "train.py", *words]) == 2
    assert "one node; pass --address" in capsys.readouterr().err


def test_a_run_is_taken_over_with_its_number_of_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "left_alone", lambda _: files.Wants(1, "10.0.0.1:6379", {"CPU": 1}, 2))
    assert main(["run", "train.py", "--engine", "ray", "--learners", "1", "--run-dir", str(tmp_path / "run")]) == 2
    assert "take it over with --hosts-per-learner 2" in capsys.readouterr().err


def parse(line: str) -> argparse.Namespace:
    ours, passed_on = split(line.split())
    return build_parser().parse_args(ours, argparse.Namespace(passed_on=passed_on))


def layout_of(line: str, recipe: str = "trainer: {max_steps: 3}") -> list[str]:
    """Return what `diloco run train.yaml --engine ray LINE` adds to the arguments of the recipe."""
    Path("train.yaml").write_text(recipe)
    arguments = parse(f"run train.yaml --engine ray --learners 1 {line}")
    return layout(arguments, Path(arguments.target))


@pytest.mark.parametrize(
    ("line", "recipe", "added"),
    [
        ("", "trainer: {max_steps: 3}", []),
        ("--hosts-per-learner 2", "trainer: {max_steps: 3}", ["--trainer.num_nodes", "2"]),
        ("--hosts-per-learner 2", "trainer: {num_nodes: 2}", ["--trainer.num_nodes", "2"]),
        ("--hosts-per-learner 2 --trainer.num_nodes=2", "trainer: {num_nodes: 3}", ["--trainer.num_nodes", "2"]),
        ("--hosts-per-learner 2", "model: x", ["--trainer.num_nodes", "2"]),
        ("", "trainer: {num_nodes: 1}", []),
    ],
)
def test_a_recipe_gets_the_number_of_hosts(line: str, recipe: str, added: list[str]) -> None:
    assert layout_of(line, recipe) == added


@pytest.mark.parametrize(
    ("line", "recipe", "said"),
    [
        ("", "trainer: {num_nodes: 2}", "--trainer.num_nodes is 2 in train.yaml, but --hosts-per-learner is 1"),
        ("--hosts-per-learner 2", "trainer: {num_nodes: 1}", "is 1 in train.yaml, but --hosts-per-learner is 2"),
        ("--hosts-per-learner 2 --trainer.num_nodes 3", "trainer: {num_nodes: 2}", "is 3 on the command line"),
        ("--hosts-per-learner 2 --trainer.num_nodes=3", "trainer: {num_nodes: 2}", "is 3 on the command line"),
    ],
)
def test_another_number_of_nodes_is_refused(line: str, recipe: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout_of(line, recipe)


def test_learners_are_started_with_their_number_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def execute(plan: Plan, *_: object, **options: object) -> Ended:
        asked.append((plan.learner_argv[-2:], options["num_hosts"]))
        return Ended(exit_code=0, summary=None)

    monkeypatch.setattr("lightning_diloco.cli.ray.run.execute_on_ray", execute)
    line = "run tiny/gpt --engine ray --learners 1 --hosts-per-learner 3 --run-dir run --no-page --no-table"
    assert main(line.split()) == 0
    assert asked == [(("--trainer.num_nodes", "3"), 3)]


def test_a_script_sets_its_number_of_nodes_itself() -> None:
    arguments = parse("run train.py --engine ray --learners 1 --hosts-per-learner 2 --trainer.num_nodes 3")
    assert layout(arguments, Path("train.py")) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("scale run 0", "0 learners: a run needs at least 1"),
        ("scale run 2", "no `diloco run --engine ray` runs in run"),
    ],
)
def test_only_a_running_run_can_be_scaled(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.seconds
def test_ray_is_imported_only_for_its_engine() -> None:
    code = "import sys, lightning_diloco.cli.main as m; m.build_parser(); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
