"""One learner of a YAML recipe: `python -m lightning_diloco.cli.fit RECIPE.yaml [overrides]`.

1. A recipe is a LightningCLI configuration of `fit`; overrides have LightningCLI's form (`--trainer.max_steps 60`).
2. The strategy is ours unless recipe or overrides say otherwise.
3. Lightning's root directory is RUN_DIR/learners/<id> under `diloco run`: two learners never share a path. Only an
   explicit override wins over it.
4. Exit code 2: starting again would not help: the configuration, the model or the secret is wrong, or the id is taken.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

from lightning_diloco.errors import AuthError, ConfigError, FencedError, PlanMismatchError
from lightning_diloco.hf.blueprint import make_importable


def cli_arguments(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """LightningCLI's command line for these words in this environment."""
    recipe, *overrides = words
    run_dir, learner = env.get("DILOCO_RUN_DIR"), env.get("DILOCO_LEARNER")
    root = [f"--trainer.default_root_dir={Path(run_dir) / 'learners' / learner}"] if run_dir and learner else []
    return ["fit", "--config", recipe, *root, *overrides]


def main() -> int:
    """Fit what the recipe describes; returns the exit code."""
    # sys.argv stays as it is: Lightning starts the other processes of a learner with it.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    make_importable(Path(sys.argv[1]))
    try:
        LightningCLI(
            args=cli_arguments(sys.argv[1:], os.environ),
            trainer_defaults={"strategy": "decoupled_diloco"},
            save_config_kwargs={"overwrite": True},
        )
    except (ConfigError, PlanMismatchError, AuthError, FencedError) as error:
        print(f"diloco: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
