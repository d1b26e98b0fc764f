"""The tiny recipe on XLA: another accelerator, and little else changed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests import command

pytestmark = [pytest.mark.xla, pytest.mark.slow]

NUM_FRAGMENTS, NUM_TOKENS = 12, 512  # of the recipe: fragments, and the vocabulary


def run(folder: Path, *changed: object, **environment: str) -> tuple[dict[str, Any], str]:
    """Its summary, and what its learner said."""
    words = ("--local", 1, "--run-dir", folder / "run", "--no-table", "--trainer.accelerator", "xla")
    command.succeed(command.ROOT, "run", "recipes/tiny/gpt.yaml", *words, *changed, PJRT_DEVICE="CPU", **environment)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["ledger_exact"]) == ("finished", True)
    return summary, (folder / "run" / "learners" / "l0" / "log.txt").read_text()


def test_tiny_recipe_learns_on_xla(tmp_path: Path) -> None:
    num_steps = 96  # enough for the sources of any Python: some are harder to learn
    summary, log = run(tmp_path, "--trainer.max_steps", num_steps)
    assert summary["tokens_seen"] == NUM_FRAGMENTS * num_steps * 16 * 128  # batch size, length
    assert summary["tokens_merged"] > 0.5 * summary["tokens_seen"]
    assert summary["eval_loss"] < math.log(NUM_TOKENS) - 1, (summary, log)  # of as many, equally likely
    assert "anchor_device='device': anchors take" in log  # said on XLA devices only


@pytest.mark.thorough
def test_tiny_recipe_learns_on_a_mesh(tmp_path: Path) -> None:
    """All devices of the process are one learner: of a batch each has its samples, of a parameter its part."""
    num_steps = 48
    small = ["--model.init_args.config.num_hidden_layers", 1, "--data.init_args.seq_len", 32]
    changed = ["--trainer.devices", 4, "--trainer.max_steps", num_steps, *small]
    summary, log = run(tmp_path, *changed, CPU_NUM_DEVICES="4")
    assert summary["tokens_seen"] == NUM_FRAGMENTS * num_steps * 16 * 32
    assert summary["tokens_merged"] > 0.5 * summary["tokens_seen"]
    assert summary["eval_loss"] < math.log(NUM_TOKENS) - 0.5, (summary, log)
    assert re.search(r"anchors take [\d.]+ MiB of each of 4 device\(s\)", log)
