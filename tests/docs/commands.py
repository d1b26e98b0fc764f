"""Finds every command in the documentation.

1. A document is a README, CONTRIBUTING.md, or the help of a verb, which ends with examples.
2. In Markdown, a command is a code span, or a line of a code block without a language other than bash. After variables
   that it sets, it starts with a program of `PROGRAMS`. A line joined by `&&` is several commands.
3. A span with only a program, or with `diloco` and a verb that needs arguments, is a name in a sentence.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_diloco.cli.main import build_parser

ROOT = Path(__file__).parents[2]
READMES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/bench/README.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]
PROGRAMS = ("diloco", "python", "pip", "pytest", "ruff", "mypy", "hf", ".ci/run")
_BLOCK = re.compile(r"^[ ]*```(\w*)\n(.*?)^[ ]*```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_SETTING = re.compile(r"""^\w+=("[^"]*"|\$\([^)]*\)|[^\s"$]*)\s+""")
_COMPLETE_ALONE = (".ci/run", "diloco ls")


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb, and of `diloco` itself under an empty name."""
    parser = build_parser()
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {"": parser, **action.choices}


def documented() -> dict[str, list[str]]:
    """Return the commands, and the document of each."""
    found: dict[str, list[str]] = {}
    for readme in READMES:
        for command in of_markdown(readme.read_text(encoding="utf-8")):
            found.setdefault(command, []).append(str(readme.relative_to(ROOT)))
    for verb, parser in verbs().items():
        for line in (parser.epilog or "").splitlines()[1:]:
            for command in _of_line(line):
                found.setdefault(command, []).append(f"diloco {verb} --help".replace("  ", " "))
    return found


def of_markdown(text: str) -> Iterator[str]:
    """Return the commands of blocks, then those of spans."""
    for language, block in _BLOCK.findall(text):
        if language in ("", "bash"):
            for line in block.splitlines():
                yield from _of_line(line)
    for span in _SPAN.findall(_BLOCK.sub("", text)):
        command = " ".join(span.split())
        if len(_bare(command).split()[:3]) > 2 or command in _COMPLETE_ALONE or _is_program_with_file(command):
            yield from _of_line(command)


def _is_program_with_file(command: str) -> bool:
    return bool(re.match(r"python [\w./]+\.py$", _bare(command)))


def _of_line(line: str) -> Iterator[str]:
    for part in re.sub(r"\s#.*", "", line).split("&&"):
        command = part.strip()
        if _bare(command).split(" ")[0] in PROGRAMS:
            yield command


def _bare(command: str) -> str:
    """Return a command without the variables that it sets."""
    while (rest := _SETTING.sub("", command, count=1)) != command:
        command = rest
    return command
