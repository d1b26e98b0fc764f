"""Fits a recipe in a learner.

1. A recipe is a LightningCLI configuration of `fit`. Overrides have LightningCLI's form (`--trainer.max_steps 60`).
2. The strategy is `decoupled_diloco`, unless the recipe or an override names another.
3. Under `diloco run`, Lightning's root directory is RUN_DIR/learners/<id>, so two learners never share a path. Only an
   explicit override takes precedence.
4. A language model that does not fit this machine with N learners is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_diloco.cli.room import check_room
from lightning_diloco.hf.recipe import RecipeCLI


class Fit(RecipeCLI):
    """Fits the recipe, if it fits the machine.

    Args:
        recipe: path of the recipe.
        num_here: number of learners on this machine.
        args: arguments of LightningCLI.
    """

    def __init__(self, recipe: Path, num_here: int, args: list[str]) -> None:
        self._num_here = num_here
        super().__init__(recipe, args=args, save_config_kwargs={"overwrite": True})

    def before_instantiate_classes(self) -> None:
        """Check the memory before anything is created."""
        check_room(self._recipe, self.config["fit"], self._num_here)


def cli_arguments(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return LightningCLI's command line for these words in this environment."""
    recipe, *overrides = words
    run_dir, learner = env.get("DILOCO_RUN_DIR"), env.get("DILOCO_LEARNER")
    root = [f"--trainer.default_root_dir={Path(run_dir) / 'learners' / learner}"] if run_dir and learner else []
    return ["fit", "--config", recipe, *root, *overrides]
