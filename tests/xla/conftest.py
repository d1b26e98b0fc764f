"""Tests of XLA run on PJRT's CPU device, where torch_xla is installed; one process for each file that says so."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["PJRT_DEVICE"] = "CPU"  # before torch_xla is imported, which otherwise looks for a TPU

pytest.register_assert_rewrite("tests.xla.fragment_cases")
