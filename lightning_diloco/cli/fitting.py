"""How a learner fits a recipe.

1. A recipe is a LightningCLI configuration of `fit`; overrides have LightningCLI's form (`--trainer.max_steps 60`).
2. The strategy is ours unless recipe or overrides say otherwise.
3. Lightning's root directory is RUN_DIR/learners/<id> under `diloco run`: two learners never share a path. Only an
   explicit override wins over it.
4. A language model that does not fit this machine, with N learners on it, is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_diloco.cli.room import check_room
from lightning_diloco.hf.recipe import RecipeCLI


class Fit(RecipeCLI):
    """Fits the recipe, if it fits the machine.

    Args:
        recipe: to fit.
        num_here: learners on this machine.
        args: of LightningCLI.
    """

    def __init__(self, recipe: Path, num_here: int, args: list[str]) -> None:
        self._num_here = num_here
        super().__init__(recipe, args=args, save_config_kwargs={"overwrite": True})

    def before_instantiate_classes(self) -> None:
        """Nothing is made yet."""
        check_room(self._recipe, self.config["fit"], self._num_here)


def cli_arguments(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """LightningCLI's command line for these words in this environment."""
    recipe, *overrides = words
    run_dir, learner = env.get("DILOCO_RUN_DIR"), env.get("DILOCO_LEARNER")
    root = [f"--trainer.default_root_dir={Path(run_dir) / 'learners' / learner}"] if run_dir and learner else []
    return ["fit", "--config", recipe, *root, *overrides]
