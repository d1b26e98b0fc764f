"""Parsing of recipes with LightningCLI; errors suggest the nearest valid name.

1. `diloco plan` finds a misspelt key in the same way as the start of a run.
2. A recipe can use classes from modules in its own folder: `class_path: video_dit.VideoDiT`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_diloco.errors import ConfigError, did_you_mean

_SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path")


class RecipeCLI(LightningCLI):
    """A LightningCLI that runs a recipe; parser errors become a `ConfigError` that suggests the nearest name.

    Args:
        recipe: the recipe's path, used in messages.
        options: arguments of LightningCLI, including `args`.
    """

    def __init__(self, recipe: Path, **options: Any) -> None:
        self._recipe = recipe
        make_importable(recipe)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within")
            super().__init__(
                trainer_defaults={"strategy": "decoupled_diloco"},
                parser_kwargs={"exit_on_error": False, "fit": {"exit_on_error": False}},
                **options,
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return `fit` only, because building a parser for each other subcommand would take as long again."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments.

        Raises:
            ConfigError: the recipe is not a valid LightningCLI config; the message includes the parser's error.
        """
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, KeyError, TypeError, ValueError) as error:
            what_to_do = _nearest(str(error)) or "correct the recipe, see recipes/tiny for a complete one"
            raise ConfigError(f"{self._recipe}: {error}; {what_to_do}") from error


class _Parser(RecipeCLI):
    """A `RecipeCLI` that only parses."""

    def instantiate_classes(self) -> None:
        """Do nothing, because this machine may not have the accelerator."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""


def make_importable(recipe: Path) -> None:
    """Append the recipe's folder to `sys.path`, so that its modules can be imported."""
    if (folder := str(recipe.resolve().parent)) not in sys.path:
        sys.path.append(folder)


def parse(recipe: Path, overrides: Sequence[str] = ()) -> Any:
    """Parse a recipe with LightningCLI to a nested namespace.

    Raises:
        ConfigError: the recipe is not a valid LightningCLI config.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about library versions
        words = ["fit", "--config", str(recipe), *overrides, "--seed_everything=false"]
        return _Parser(recipe, args=words, save_config_callback=None, seed_everything_default=False).config["fit"]


def _nearest(problem: str) -> str | None:
    """Return a suggestion with the valid name most similar to the one that the parser refused, or None."""
    refused = re.search(r"ption '([\w.]+)'|arguments: --([\w.]+)", problem)
    if refused is None:
        return None
    path = (refused[1] or refused[2]).split(".")
    owner = re.search(r"class_path '([\w.]+)'", problem)
    if owner is not None:
        name, names = path[-1], _arguments_of(class_of({"class_path": owner[1]}))
    elif path[0] not in _SECTIONS and len(path) > 1:
        name, names = path[0], _SECTIONS
    else:
        name, names = path[-1], _arguments_of(L.Trainer)
    return did_you_mean(name, names)


def _arguments_of(made: type) -> tuple[str, ...]:
    return tuple(inspect.signature(made.__init__).parameters)


def class_of(section: Any) -> type:
    """Return the class of a `class_path` section."""
    module, _, name = str(section["class_path"]).rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found
