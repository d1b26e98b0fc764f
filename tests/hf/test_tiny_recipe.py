"""The tiny recipes agree with their descriptions."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_diloco.hf import CausalLM, TextData

TINY = Path(__file__).parents[2] / "recipes" / "tiny"


def _cli(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> LightningCLI:
    monkeypatch.setattr(sys, "argv", ["diloco"])  # otherwise LightningCLI warns of arguments that it does not use
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 causes them
    args = ["--config", str(TINY / "gpt.yaml"), "--trainer.logger=false", *overrides]
    return LightningCLI(args=args, run=False, save_config_callback=None)


def test_recipe_builds_model_data_and_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = _cli(monkeypatch, "--trainer.strategy=auto", "--trainer.max_steps=5", "--data.init_args.batch_size=4")
    assert isinstance(cli.model, CausalLM)
    assert isinstance(cli.datamodule, TextData)
    assert cli.trainer.max_steps == 5
    assert cli.datamodule.hparams.batch_size == 4


def test_recipe_model_has_the_size_in_its_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = _cli(monkeypatch, "--trainer.strategy=auto")
    cli.model.hparams.config["vocab_size"] = cli.datamodule.hparams.vocab_size
    with torch.device("meta"):
        cli.model.configure_model()
    num_parameters = sum(p.numel() for p in cli.model.parameters())
    assert f"{num_parameters / 1e6:.2f}M-parameter" in (TINY / "README.md").read_text()


@pytest.mark.slow
def test_script_trains_without_the_strategy(tmp_path: Path) -> None:
    command = [sys.executable, str(TINY / "train.py"), "--strategy", "auto", "--max-steps", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "`max_steps=3` reached" in done.stdout + done.stderr


def test_script_is_short() -> None:
    assert len((TINY / "train.py").read_text().splitlines()) <= 90
