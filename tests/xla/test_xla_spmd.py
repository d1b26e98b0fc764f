"""SPMD is switched on for a whole process, before its first tensor: its tests have processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def results(*argv: str, **environment: str) -> dict[str, Any]:
    """What a script printed as its last line."""
    done = run("-m", *argv, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_cases_pass_on_four_devices() -> None:
    cases = [str(HERE / f"spmd_{subject}_cases.py") for subject in ("fragment", "trainer")]
    done = run("-m", "pytest", "-q", "-n", "0", "-m", "xla", *cases)
    assert done.returncode == 0, done.stdout[-8000:]


def test_losses_on_four_devices_equal_those_on_one_xla_device() -> None:
    one, four = (results("tests.xla.losses", count, CPU_NUM_DEVICES=count) for count in ("1", "4"))
    assert (one["strategy"], four["strategy"]) == ("SingleDeviceXLADiLoCo", "SpmdXLADiLoCo")
    assert four["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert len(set(one["losses"])) == 16


def test_nothing_is_gathered_for_an_exchange_but_where_blocks_or_rows_demand_it(tmp_path: Path) -> None:
    expected = {
        "1024x256:1": 0,  # whole blocks: nothing but two norms
        "1024x384:1": 1 / 32,  # the last 32 columns of a device share their block with the next device's first
        "1024x256:0": 2,  # the rows of a slice lie on two devices: all of the parameter is gathered
    }
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    found = results("tests.xla.collectives", str(tmp_path), *expected, XLA_FLAGS=flags)
    for case, share in expected.items():
        assert found[case]["largest_collective"] == max(1, share * found[case]["fragment"])


def test_spmd_that_is_switched_on_too_late_is_refused() -> None:
    script = """
import torch, torch_xla, lightning as L, lightning_diloco
torch.ones(2).to("xla")
L.Trainer(accelerator="xla", devices=4, strategy="decoupled_diloco", logger=False)
"""
    done = run("-c", script)
    assert done.returncode == 1
    assert "ConfigError: several XLA devices were asked for after tensors were made on one" in done.stderr
