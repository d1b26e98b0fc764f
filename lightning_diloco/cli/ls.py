"""`diloco ls`: lists the recipes."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_diloco.cli import recipes
from lightning_diloco.cli.verbs import add_verb

_EXAMPLE = "example:\n  diloco ls"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "list the recipes: name, model, description"
    parser = add_verb(verbs, "ls", about, _EXAMPLE)
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Print one line per recipe."""
    found = recipes.find()
    if not found:
        print("no recipes in " + ", ".join(map(str, recipes.roots())))
        return 0
    name_width = max(len(recipe.name) for recipe in found)
    model_width = max(len(recipe.model) for recipe in found)
    for recipe in found:
        print(f"{recipe.name:{name_width}}  {recipe.model:{model_width}}  {recipe.description}".rstrip())
    return 0
