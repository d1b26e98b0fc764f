"""Compiled programs are kept on disk if the platform can load them; these tests only simulate its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_diloco.devices.xla import ops as xla

pytestmark = pytest.mark.xla

SCRIPT = """
import json
import torch
import torch_xla.runtime as xr
from torch_xla.debug import metrics
from lightning_diloco.devices.xla import ops as xla

xr.device_type = lambda: "TPU"
kept = xla.keep_compilations()
(x,) = xla.upload(torch.ones(8))
y = x * 3
xla.sync()
found = {name: metrics.counter_value("PersistentCache" + name) or 0 for name in ("Miss", "Hit", "DeserializeFailure")}
print(json.dumps({"kept": kept, "again": xla.keep_compilations(), "value": float(y[0]), **found}))
"""


def outcome(**environment: str) -> dict[str, object]:
    settings = {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=True, env={**settings, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_second_process_finds_the_programs_of_the_first(tmp_path):
    """PJRT's CPU device writes programs and finds them again, but cannot load them; a TPU can."""
    folder, elsewhere = tmp_path / "lightning_diloco" / "xla", tmp_path / "elsewhere"
    first = outcome(XDG_CACHE_HOME=str(tmp_path))
    assert any(folder.iterdir())
    second = outcome(XDG_CACHE_HOME=str(elsewhere), XLA_PERSISTENT_CACHE_PATH=str(folder))  # the user's choice
    assert not elsewhere.exists()
    for found in (first, second):
        assert (found["kept"], found["value"]) == (True, 3.0)
        assert found["again"] is False  # too late after a computation
    assert first["Miss"] > 0
    assert second["Miss"] == 0
    assert second["Hit"] + second["DeserializeFailure"] == first["Miss"]


def test_no_program_is_kept_for_a_cpu(monkeypatch):
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH", raising=False)
    assert xla.keep_compilations() is False
    assert "XLA_PERSISTENT_CACHE_PATH" not in os.environ
