"""`diloco ls`: the recipes that can be run."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_diloco.cli import recipes

_EXAMPLE = "example:\n  diloco ls"


def add_parser(verbs: Any) -> None:
    """Add this verb."""
    about = "list the recipes: name, model, description"
    parser = verbs.add_parser("ls", help=about, description=f"{about[0].upper() + about[1:]}.", epilog=_EXAMPLE)
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
