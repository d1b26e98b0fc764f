"""Finds misspelt words of a command line and the nearest known name. The similarity threshold is our choice."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterable

from lightning_diloco.config import RunConfig

# Options of LightningCLI's `fit`.
SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "weights_only",
            "config", "print_config", "help")  # fmt: skip
_ALIKE, _VERY_ALIKE = 0.6, 0.85


def nearest(word: str, names: Iterable[str], *, alike: float = _ALIKE) -> str | None:
    """Return the name nearest to this word (without `=value`), or None if none is similar."""
    near = difflib.get_close_matches(_name(word).replace("_", "-"), list(names), n=1, cutoff=alike)
    return near[0] if near else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return a question to append to a message about this word; empty if no name is similar."""
    near = nearest(word, names)
    return f" (did you mean {near}?)" if near else ""


def of_script(arguments: argparse.Namespace) -> list[str]:
    """Return problems with a script's words that look like options of `diloco run`, unless they follow `--`."""
    if arguments.is_divided:
        return []
    near = {word: nearest(word, arguments.options, alike=_VERY_ALIKE) for word in _options(arguments)}
    return [
        f"{_name(word)} would be passed on to {arguments.target}; write {ours}, or put -- before a script's option"
        for word, ours in near.items()
        if ours not in (None, _name(word))
    ]


def of_recipe(arguments: argparse.Namespace) -> list[str]:
    """Return problems with options that neither `diloco run` nor any recipe takes."""
    of_run = {f"--{field.name.replace('_', '-')}": field.name for field in dataclasses.fields(RunConfig)}
    found = []
    for name in map(_name, _options(arguments)):
        if name in arguments.options:
            found.append(f"{name}: must come before the options that are passed on to the recipe")
        elif name[2:].rstrip("+").partition(".")[0] not in SECTIONS:
            near = [ours] if (ours := nearest(name, arguments.options)) else []
            near += [f"--trainer.strategy.{of_run[run]}"] if (run := nearest(name, of_run, alike=_VERY_ALIKE)) else []
            meant = f"did you mean {' or '.join(near)}?" if near else "see `diloco run --help` and the recipe"
            found.append(f"{name}: unknown; options of a recipe look like --trainer.max_steps or --model.lr; {meant}")
    return found


def _options(arguments: argparse.Namespace) -> list[str]:
    return [word for word in arguments.passed_on if word.startswith("--") and word != "--"]


def _name(word: str) -> str:
    return word.partition("=")[0]
