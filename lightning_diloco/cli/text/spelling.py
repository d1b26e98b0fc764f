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
# Arguments of Lightning's Trainer.
TRAINER = (
    "accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks", "fast_dev_run",
    "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "limit_train_batches",
    "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches", "val_check_interval",
    "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing",
    "enable_progress_bar", "enable_model_summary", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "deterministic", "benchmark", "inference_mode", "use_distributed_sampler",
    "profiler", "detect_anomaly", "barebones", "plugins", "sync_batchnorm", "reload_dataloaders_every_n_epochs",
    "default_root_dir", "enable_autolog_hparams", "model_registry",
)  # fmt: skip
_ALIKE, _VERY_ALIKE = 0.6, 0.85


def nearest(word: str, names: Iterable[str], *, alike: float = _ALIKE) -> str | None:
    """Return the name nearest to this word (without `=value`), or None if none is similar."""
    near = difflib.get_close_matches(_name(word).replace("_", "-"), list(names), n=1, cutoff=alike)
    return near[0] if near else None


def hint(word: str, names: Iterable[str]) -> str:
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
    of_run = {_flag(field.name): field.name for field in dataclasses.fields(RunConfig)}
    of_trainer = {_flag(name): name for name in TRAINER}
    found = []
    for name in map(_name, _options(arguments)):
        section, _, argument = name[2:].rstrip("+").partition(".")
        argument = argument.partition(".")[0]
        if name in arguments.options:
            found.append(f"{name}: must come before the options that are passed on to the recipe")
        elif section == "trainer" and argument not in ("", *TRAINER):
            near = nearest(_flag(argument), of_trainer)
            meant = f"; did you mean --trainer.{of_trainer[near]}?" if near else ""
            found.append(f"{name}: Lightning's Trainer has no {argument}{meant}")
        elif section not in SECTIONS:
            if trainer := nearest(name, of_trainer, alike=_VERY_ALIKE):
                likely = [f"--trainer.{of_trainer[trainer]}"]
            else:
                likely = [ours] if (ours := nearest(name, arguments.options)) else []
                run = nearest(name, of_run, alike=_VERY_ALIKE)
                likely += [f"--trainer.strategy.{of_run[run]}"] if run else []
            meant = f"did you mean {' or '.join(likely)}?" if likely else "see `diloco run --help` and the recipe"
            found.append(f"{name}: unknown; options of a recipe look like --trainer.max_steps or --model.lr; {meant}")
    return found


def _options(arguments: argparse.Namespace) -> list[str]:
    return [word for word in arguments.passed_on if word.startswith("--") and word != "--"]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _name(word: str) -> str:
    return word.partition("=")[0]
