"""The tiny recipe on XLA, with another accelerator and few other changes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests import command

pytestmark = [pytest.mark.xla, pytest.mark.slow]

NUM_FRAGMENTS, NUM_TOKENS = 12, 512  # fragments and vocabulary of the recipe


def run(folder: Path, *changed: object, **environment: str) -> tuple[dict[str, Any], str]:
    """Return the summary of a run, and the output of its learner."""
    words = ("--local", 1, "--run-dir", folder / "run", "--no-table", "--trainer.accelerator", "xla")
    command.succeed(command.ROOT, "run", "recipes/tiny/gpt.yaml", *words, *changed, PJRT_DEVICE="CPU", **environment)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["ledger_exact"]) == ("finished", True)
    return summary, (folder / "run" / "learners" / "l0" / "log.txt").read_text()


def test_tiny_recipe_learns_on_xla(tmp_path: Path) -> None:
    num_steps = 96  # enough for any Python version, because some sources are harder to learn
    summary, log = run(tmp_path, "--trainer.max_steps", num_steps)
    assert summary["tokens_seen"] == NUM_FRAGMENTS * num_steps * 16 * 128  # batch size, length
    assert summary["tokens_merged"] > 0.5 * summary["tokens_seen"]
    assert summary["eval_loss"] < math.log(NUM_TOKENS) - 1, (summary, log)  # loss with equally likely tokens
    assert "anchor_device='device': anchors take" in log  # logged only on XLA devices


@pytest.mark.thorough
def test_tiny_recipe_learns_on_a_mesh(tmp_path: Path) -> None:
    """All devices of the process are one learner; each has some samples of a batch and a part of each parameter."""
    num_steps = 48
    small = ["--model.init_args.config.num_hidden_layers", 1, "--data.init_args.seq_len", 32]
    changed = ["--trainer.devices", 4, "--trainer.max_steps", num_steps, *small]
    summary, log = run(tmp_path, *changed, CPU_NUM_DEVICES="4")
    assert summary["tokens_seen"] == NUM_FRAGMENTS * num_steps * 16 * 32
    assert summary["tokens_merged"] > 0.5 * summary["tokens_seen"]
    assert summary["eval_loss"] < math.log(NUM_TOKENS) - 0.5, (summary, log)
    assert re.search(r"anchors take [\d.]+ MiB of each of 4 device\(s\)", log)
