"""`diloco cp`: copies a recipe and the modules that it uses from its own folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_diloco.cli import recipes
from lightning_diloco.cli.verbs import add_verb
from lightning_diloco.errors import ConfigError

_EXAMPLE = "example:\n  diloco cp tiny/gpt my_gpt.yaml && diloco run my_gpt.yaml --local 2"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "copy a recipe for editing"
    parser = add_verb(verbs, "cp", about, _EXAMPLE)
    parser.add_argument("recipe", metavar="RECIPE", help="name (see `diloco ls`) or path of a recipe")
    parser.add_argument("path", metavar="PATH", help="new file, or a folder (FOLDER/ is made); nothing is overwritten")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Copy all files or none, and print their paths."""
    source = recipes.find_file(arguments.recipe)
    wanted = Path(arguments.path)
    is_folder = wanted.is_dir() or arguments.path.endswith("/")
    if not is_folder and wanted.suffix != source.suffix:
        raise ConfigError(f"{wanted}: must end in {source.suffix}, as {source.name} does; a folder ends in /")
    target = wanted / source.name if is_folder else wanted
    copies = {source: target, **{path: target.with_name(path.name) for path in recipes.modules_beside(source)}}
    if taken := [str(path) for path in copies.values() if path.exists()]:
        raise ConfigError(f"{', '.join(taken)} already exists; choose another path, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    for original, copy in copies.items():
        with copy.open("xb") as file:
            file.write(original.read_bytes())
        print(f"{original} -> {copy}")
    return 0
