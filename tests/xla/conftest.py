"""Tests of XLA run on PJRT's CPU device if torch_xla is installed; some files run in a process of their own."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["PJRT_DEVICE"] = "CPU"  # before torch_xla is imported, which otherwise looks for a TPU

pytest.register_assert_rewrite("tests.xla.fragment_cases")
