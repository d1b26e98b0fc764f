"""Recipes through LightningCLI's own parser: what it refuses is said with the nearest name.

1. A misspelt key is found by `diloco plan` as it would be at the start of a run.
2. A recipe can name classes of modules that lie beside it: `class_path: video_dit.VideoDiT`.
"""

from __future__ import annotations

import difflib
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

from lightning_diloco.errors import ConfigError

_SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path")


class RecipeCLI(LightningCLI):
    """Runs a recipe; what its parser refuses is a `ConfigError` that offers the nearest name.

    Args:
        recipe: named in messages.
        options: of LightningCLI; `args` among them.
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
        """`fit` alone: a parser for each of the others takes as long as this one."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, or say what is wrong.

        Raises:
            ConfigError: it is no configuration of LightningCLI; with what its parser said.
        """
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, KeyError, TypeError, ValueError) as error:
            what_to_do = _nearest(str(error)) or "correct the recipe, see recipes/tiny for a complete one"
            raise ConfigError(f"{self._recipe}: {error}; {what_to_do}") from error


class _Parser(RecipeCLI):
    """Parses and stops."""

    def instantiate_classes(self) -> None:
        """Make nothing: the accelerator may not be here."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def make_importable(recipe: Path) -> None:
    """Let Python find modules beside the recipe, after everything that is installed."""
    if (folder := str(recipe.resolve().parent)) not in sys.path:
        sys.path.append(folder)


def parse(recipe: Path, overrides: Sequence[str] = ()) -> Any:
    """The recipe as LightningCLI understands it, a nested namespace.

    Raises:
        ConfigError: it is no configuration of LightningCLI.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the versions of its own libraries
        words = ["fit", "--config", str(recipe), *overrides, "--seed_everything=false"]
        return _Parser(recipe, args=words, save_config_callback=None, seed_everything_default=False).config["fit"]


def _nearest(problem: str) -> str | None:
    """The accepted name that is most like the one the parser refused."""
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
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else None


def _arguments_of(made: type) -> tuple[str, ...]:
    return tuple(inspect.signature(made.__init__).parameters)


def class_of(section: Any) -> type:
    """The class of a `class_path` section."""
    module, _, name = str(section["class_path"]).rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found
