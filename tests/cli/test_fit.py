"""A recipe becomes a LightningCLI fit with its files in the learner's own folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
seed_everything: 1
trainer: {strategy: auto, accelerator: cpu, max_steps: 5, enable_progress_bar: false, logger: false,
          enable_checkpointing: false, limit_val_batches: 0}
model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}
data: {class_path: lightning.pytorch.demos.boring_classes.BoringDataModule}
"""


def fit(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "recipe.yaml").write_text(RECIPE)
    env = {**os.environ, "DILOCO_RUN_DIR": str(folder / "run"), "DILOCO_LEARNER": "l1"}
    command = (sys.executable, "-m", "lightning_diloco.cli.fit", str(folder / "recipe.yaml"), *overrides)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_recipe_is_fitted_twice_with_overrides_in_the_folder_of_its_learner(tmp_path: Path) -> None:
    for _ in range(2):  # a learner that is started again finds what it wrote
        ended = fit(tmp_path, "--trainer.max_steps", "3")
        assert ended.returncode == 0, ended.stderr
        assert "`max_steps=3` reached" in ended.stdout + ended.stderr
        assert "args parameter is intended" not in ended.stderr
    assert (tmp_path / "run" / "learners" / "l1" / "config.yaml").is_file()


@pytest.mark.slow
def test_an_unknown_override_ends_with_the_exit_code_that_prevents_a_restart(tmp_path: Path) -> None:
    ended = fit(tmp_path, "--trainer.max_stepz", "3")
    assert ended.returncode == 2
    assert "max_stepz" in ended.stderr
