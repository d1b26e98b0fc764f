"""The help of every verb ends with examples that its parser accepts, with existing recipes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_diloco.cli import recipes
from lightning_diloco.cli.main import SPLITTING, build_parser

ROOT = Path(__file__).parents[2]
OF_RECIPES = ("run", "fit", "chaos", "plan", "cp", "launch")


def verbs() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def examples(epilog: str | None) -> Iterator[str]:
    """Return the `diloco` commands in an epilog; one line may hold several."""
    for line in (epilog or "").splitlines()[1:]:
        for command in line.split("&&"):
            if "diloco " in command:
                yield command[command.index("diloco ") + len("diloco ") :]


ALL = {"": build_parser(), **verbs()}


@pytest.mark.parametrize("verb", ALL)
def test_help_ends_with_an_example(verb: str) -> None:
    parser = ALL[verb]
    assert parser.epilog is not None
    assert parser.epilog.startswith("example")
    assert parser.format_help().rstrip().endswith(parser.epilog.rstrip())
    assert any(True for _ in examples(parser.epilog))


@pytest.mark.parametrize("example", [example for parser in ALL.values() for example in examples(parser.epilog)])
def test_an_example_of_the_help_parses(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(example)
    ours, passed_on = SPLITTING[words[0]](words) if words[0] in SPLITTING else (words, [])
    arguments = build_parser().parse_args(ours, argparse.Namespace(passed_on=passed_on))
    named = getattr(arguments, "recipe", None) or getattr(arguments, "target", None)
    if words[0] in OF_RECIPES and named not in ("train.py", "my_gpt.yaml"):  # the reader's own
        assert recipes.resolve(named).is_file()
