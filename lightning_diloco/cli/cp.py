"""`diloco cp`: a recipe of one's own to edit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_diloco.cli import recipes
from lightning_diloco.errors import ConfigError

_EXAMPLE = "example:\n  diloco cp tiny/gpt my_gpt.yaml && diloco run my_gpt.yaml --local 2"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "copy a recipe, to edit it"
    parser = verbs.add_parser("cp", help=about, description=f"{about[0].upper() + about[1:]}.", epilog=_EXAMPLE)
    parser.add_argument("recipe", metavar="RECIPE", help="name (see `diloco ls`) or path of a recipe")
    parser.add_argument("path", metavar="PATH", type=Path, help="new file, or a folder; nothing is overwritten")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Copy the file and say where it is."""
    source = recipes.resolve(arguments.recipe)
    target: Path = arguments.path / source.name if arguments.path.is_dir() else arguments.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            copy.write(source.read_bytes())
    except FileExistsError:
        raise ConfigError(f"{target} exists and is not overwritten; choose another path, or remove it first") from None
    print(f"{source} -> {target}")
    return 0
