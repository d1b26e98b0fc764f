"""SPMD is switched on for a whole process, before its first tensor: its tests have one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.xla, pytest.mark.slow]

HERE = Path(__file__).parent


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        check=False,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=570,
    )


def test_spmd_cases_pass_on_four_devices() -> None:
    done = run("-m", "pytest", "-q", "-m", "xla", str(HERE / "spmd_cases.py"))
    assert done.returncode == 0, done.stdout[-8000:]


def test_spmd_that_is_switched_on_too_late_is_refused() -> None:
    script = """
import torch, torch_xla, lightning as L, lightning_diloco
torch.ones(2).to("xla")
L.Trainer(accelerator="xla", devices=4, strategy="decoupled_diloco", logger=False)
"""
    done = run("-c", script)
    assert done.returncode == 1
    assert "ConfigError: several XLA devices were asked for after tensors were made on one" in done.stderr
