"""Fits a recipe in a learner.

1. A recipe is a LightningCLI configuration of `fit`. Overrides have LightningCLI's form (`--trainer.max_steps 60`).
2. The strategy is `decoupled_diloco`, unless the recipe or an override names another.
3. Under `diloco run`, Lightning's root directory is RUN_DIR/learners/<id>, so two learners never share a path. Only an
   explicit override takes precedence.
4. The configuration saved beside the checkpoints names the run, but not the token.
5. A language model that does not fit this machine with N learners is refused before anything is loaded.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import SaveConfigCallback

from lightning_diloco.cli.local.memory_check import check_room
from lightning_diloco.hf.recipe import RecipeCLI
from lightning_diloco.transport.address import redact


class Fit(RecipeCLI):
    """Fits the recipe, if it fits the machine.

    Args:
        recipe: path of the recipe.
        num_here: number of learners on this machine.
        args: arguments of LightningCLI.
    """

    def __init__(self, recipe: Path, num_here: int, args: list[str]) -> None:
        self._num_here = num_here
        super().__init__(recipe, args=args, save_config_callback=SaveRedacted, save_config_kwargs={"overwrite": True})

    def before_instantiate_classes(self) -> None:
        """Check the memory before anything is created."""
        check_room(self._recipe, self.config["fit"], self._num_here)


class SaveRedacted(SaveConfigCallback):
    """Saves the configuration without the secrets in its join strings."""

    def __init__(self, parser: Any, config: Namespace, *args: Any, **options: Any) -> None:
        super().__init__(parser, _redacted(config), *args, **options)


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Namespace):
        return type(value)(**{key: _redacted(inner) for key, inner in vars(value).items()})
    if isinstance(value, dict):
        return {key: _redacted(inner) for key, inner in value.items()}
    return [_redacted(inner) for inner in value] if isinstance(value, list) else value


def cli_arguments(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return LightningCLI's command line for these words in this environment."""
    recipe, *overrides = words
    run_dir, learner = env.get("DILOCO_RUN_DIR"), env.get("DILOCO_LEARNER")
    root = [f"--trainer.default_root_dir={Path(run_dir) / 'learners' / learner}"] if run_dir and learner else []
    return ["fit", "--config", recipe, *root, *overrides]
