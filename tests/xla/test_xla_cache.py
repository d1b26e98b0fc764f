"""Compiled programs are kept on disk where the platform can load them; only its name is made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xla

SCRIPT = """
import json, os, sys
import torch
import torch_xla.runtime as xr
from torch_xla.debug import metrics
from lightning_diloco.devices import xla

xr.device_type = lambda: sys.argv[1]
kept = xla.keep_compilations()
(x,) = xla.upload(torch.ones(8))
y = x * 3
xla.sync()
found = {name: metrics.counter_value("PersistentCache" + name) or 0 for name in ("Miss", "Hit", "DeserializeFailure")}
print(json.dumps({"kept": kept, "again": xla.keep_compilations(), "value": float(y[0]), **found}))
"""


def outcome(folder: Path, platform: str, **environment: str) -> dict[str, object]:
    settings = {"PJRT_DEVICE": "CPU", "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, platform],
        check=True, env={**settings, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_second_process_finds_the_programs_of_the_first(tmp_path):
    """PJRT's CPU device writes programs and finds them again, but cannot load what it found; a TPU can."""
    first, second = outcome(tmp_path, "TPU"), outcome(tmp_path, "TPU")
    assert (first["kept"], second["kept"]) == (True, True)
    assert first["again"] is False  # too late: something was computed
    assert first["value"] == second["value"] == 3.0
    assert first["Miss"] > 0
    assert second["Miss"] == 0
    assert second["Hit"] + second["DeserializeFailure"] == first["Miss"]
    assert any((tmp_path / "lightning_diloco" / "xla").iterdir())


def test_folder_that_people_chose_is_taken_and_a_cpu_keeps_nothing(tmp_path):
    chosen = outcome(tmp_path / "not-here", "TPU", XLA_PERSISTENT_CACHE_PATH=str(tmp_path / "chosen"))
    assert chosen["kept"] is True
    assert any((tmp_path / "chosen").iterdir())
    assert outcome(tmp_path / "not-here", "CPU")["kept"] is False
    assert not (tmp_path / "not-here").exists()
