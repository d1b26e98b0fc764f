"""The READMEs: commands parse, paths exist, and the Python block trains."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_diloco.cli import chaos, run
from lightning_diloco.cli.main import build_parser, main
from lightning_diloco.hf.recipe import parse
from tests.bench import run as bench

ROOT = Path(__file__).parents[1]
VERBS = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
READMES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/bench/README.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]
PLACEHOLDERS = ("RECIPE", "DIR", "PATH", "train.py", "runs/")
COMMANDS = [
    pytest.param(command, id=f"{readme.parent.name}: {command}")
    for readme in READMES
    for command in dict.fromkeys(re.findall(rf"diloco (?:{'|'.join(VERBS)})\b[^`\n&|]*", readme.read_text()))
]

PYTHON = [
    pytest.param(command, id=f"{readme.parent.name}: {command}")
    for readme in READMES
    for command in dict.fromkeys(re.findall(r"\bpython (?:-m )?[\w./][^`\n&|#]*", readme.read_text()))
    if not command.startswith(("python train.py", "python -m torch.tpu."))  # the reader's own; test_torch_tpu.py
]

CHEAP = [  # tests/recipes compares the figures of other recipes' plans
    command for command in COMMANDS if re.match(r"diloco (plan RECIPE|ls|cp RECIPE)", command.values[0])
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_readme_parses(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    splitting = {"run": run.split, "chaos": chaos.split}.get(words[0])
    ours, passed_on = splitting(words) if splitting else (words, [])
    if len(ours) > 1:  # a verb alone is a name in a sentence
        build_parser().parse_args(ours, argparse.Namespace(passed_on=passed_on))
    if passed_on and ours[1].endswith(".yaml"):
        parse(ROOT / ours[1], passed_on)
    for word in ours:
        if word.endswith(".yaml") and not word.startswith(PLACEHOLDERS):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("command", PYTHON)
def test_python_programs_of_a_readme_exist_and_have_these_options(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "-m":
        found = find_spec(words[1])
        assert found is not None
        assert found.origin is not None
        source, words = Path(found.origin), words[2:]
    else:
        source, words = ROOT / words[0], words[1:]
    named = source.read_text().replace("_", "-")  # some options are computed from names of fields
    assert not [word for word in words if word.startswith("--") and word[2:] not in named]
    assert not [word for word in words if word.endswith(".yaml") and not (ROOT / word).exists()]
    if source == ROOT / "tests" / "bench" / "run.py":
        assert set(words) <= set(bench.NAMES)


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_extras_that_a_readme_installs_are_declared(readme: Path) -> None:
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    wanted = re.findall(r"pip install '?(?:-e '?\.|lightning-diloco)\[(\w+)\]", readme.read_text())
    assert not [extra for extra in wanted if not re.search(rf"^{extra} = ", declared, re.MULTILINE)]


def test_there_are_commands_to_test() -> None:
    assert len(COMMANDS) > 10
    assert len(PYTHON) >= 6
    assert {"plan", "ls", "cp"} <= {command.values[0].split()[1] for command in CHEAP}


@pytest.mark.parametrize("command", CHEAP)
def test_cheap_command_of_the_readme_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)[1:]
    assert main([{"RECIPE": "tiny/gpt", "PATH": "mine.yaml"}.get(word, word) for word in words]) == 0
    if words[0] == "cp":
        assert (tmp_path / "mine.yaml").read_bytes() == (ROOT / "recipes" / "tiny" / "gpt.yaml").read_bytes()


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_links_and_pictures_of_a_readme_exist(readme: Path) -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", readme.read_text())]
    missing = [t for t in targets if t and "://" not in t and not (readme.parent / t).exists()]
    assert not missing


@pytest.mark.slow
def test_python_block_of_the_readme_trains(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "script.py"
    prologue = "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
    models = "model, datamodule = BoringModel(), BoringDataModule()\n"
    script.write_text(prologue + models + block.replace("max_steps=2000", "max_steps=20"))
    done = subprocess.run(
        [sys.executable, str(script)], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("diloco/*/tape/events.jsonl"))
