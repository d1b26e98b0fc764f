"""A shell runs every documented command in a clone of this checkout; see `chains.py`.

`diloco plan`, `simulate`, `launch`, `ls` and `cp` are called in this process, because starting one takes longer than
they do.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_diloco.cli.main import build_parser, main
from tests.bench import run as bench
from tests.docs.chains import CHAINS, IN_CI, NOT_HERE, executed
from tests.docs.commands import ROOT, documented
from tests.docs.shell import Clone, Step

OWN_SCRIPT = """import argparse

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_diloco  # noqa: F401

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
options = {"accelerator": "cpu", "devices": 1, "logger": False, "limit_val_batches": 1}
trainer = L.Trainer(strategy="decoupled_diloco", max_epochs=parser.parse_args().epochs, **options)
trainer.fit(BoringModel())
"""


def test_every_documented_command_has_a_step_and_every_step_is_documented() -> None:
    found = documented()
    here = [*(command for command, _ in executed()), *NOT_HERE]
    assert not [f"{command}  ({', '.join(places)})" for command, places in found.items() if command not in here]
    assert not [command for command in here if command not in found]
    assert len(here) == len(set(here)), "each by one step"


@pytest.mark.parametrize(
    ("command", "step"), list(executed()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_step_has_program_verb_and_options_of_the_command_that_it_represents(command: str, step: Step) -> None:
    wanted, found = shlex.split(command), shlex.split(step.line)
    is_setting = re.compile(r"^\w+=").match
    assert [bool(is_setting(word)) for word in wanted[:1]] == [bool(is_setting(word)) for word in found[:1]]
    if wanted[0] in ("diloco", "pytest", "ruff", "mypy"):
        assert found[:2] == wanted[:2] or len(wanted) == 1
    assert not [word for word in wanted if word.startswith("--") and len(word) > 2 and word not in found]


@pytest.mark.parametrize("command", NOT_HERE)
def test_commands_that_cannot_run_here_parse(command: str) -> None:
    words = shlex.split(command)
    match words[0]:
        case "pip":
            extras = re.findall(r"\[(\w+)\]", command)
            declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
            assert not [extra for extra in extras if not re.search(rf"^{extra} = ", declared, re.MULTILINE)]
            assert not [word for word in words if word.startswith(".ci/") and not (ROOT / word).is_file()]
        case "python" if words[1] == "-m":
            assert callable(importlib.import_module(words[2]).main)
        case "python":
            assert (ROOT / words[1]).is_file()
            assert all(callable(importlib.import_module(f"tests.bench.{name}").main) for name in words[2:])
            assert set(words[2:]) <= set(bench.NAMES)
        case ".ci/run":
            subprocess.run(["bash", "-n", command], cwd=ROOT, check=True)
        case "diloco":
            assert build_parser().parse_args(words[1:]).engine == "ray"
        case "hf":
            assert shutil.which("hf")
        case "PJRT_DEVICE=CPU":
            assert callable(importlib.import_module(words[-1]).main)
        case _:
            assert command == "PJRT_DEVICE=TPU python train.py"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    made = Clone(tmp_path_factory.mktemp("clone"))
    (made.root / "train.py").write_text(OWN_SCRIPT)
    for k in range(40):
        text = made.root / "texts" / "more" / f"{k}.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(f"document {k}: " + " ".join(f"{n} times {k} is {n * k}." for n in range(200)))
    yield made
    made.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.thorough) for name in CHAINS]
)
def test_documented_commands_have_the_expected_results(
    name: str, clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone.root)
    try:
        for step in CHAINS[name]:
            if step.line.split()[:2] in [["diloco", word] for word in ("plan", "simulate", "launch", "ls", "cp")]:
                said = _in_this_process(step)
                assert re.search(step.says, said), said
                assert all(any(clone.root.glob(pattern)) for pattern in step.leaves)
            else:
                clone.run(step)
        clone.end()
    finally:
        clone.kill()


def _in_this_process(step: Step) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(shlex.split(step.line)[1:]) == step.exits, step.line
    return said.getvalue()


@pytest.mark.slow
def test_rendered_tables_equal_the_stored_results(clone: Clone) -> None:
    clone.run(Step(line="python -m tests.bench.render"))
    for readme in (Path("README.md"), Path("tests") / "bench" / "README.md"):
        assert (clone.root / readme).read_text() == (ROOT / readme).read_text()
